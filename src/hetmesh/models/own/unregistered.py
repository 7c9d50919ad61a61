"""Parameters that a user's module keeps where nn.Module does not look: in lists, dicts, closures, class attributes.

No optimizer, checkpoint or layout would ever see them. Those that are registered too get memory when they are sharded,
under their name alone, and what else refers to them would keep an empty tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest

_REGISTRIES = {"_parameters", "_buffers", "_modules"}


def check_registered(example: nn.Module, request: AdapterRequest) -> None:
    """Raise RecipeError if something in `example` refers to parameters that are not registered, or beside their name.

    Modules that are not registered may be there if all of their weights are frozen. Looked at: attributes of modules
    and of their classes, what these hold, and closures and globals of their methods.
    """
    names = {id(parameter): name for name, parameter in example.named_parameters()}
    modules = {id(module) for module in example.modules()}
    for prefix, owner in example.named_modules():
        seen: dict[int, Any] = {}
        for key, value in _attributes(owner):
            for held in _held(value, modules, seen):
                where = f"{request.key}: {type(owner).__name__}.{key}" + (f" (of {prefix})" if prefix else "")
                if id(held) in names:
                    raise RecipeError(
                        f"{where} holds parameter {names[id(held)]} beside its name; parameters get their memory when "
                        "they are sharded, and this would stay empty: look it up by its name in forward"
                    )
                kind = "parameter" if isinstance(held, nn.Parameter) else "tensor with requires_grad"
                what = f"{type(held).__name__} with parameters" if isinstance(held, nn.Module) else kind
                raise RecipeError(
                    f"{where} holds a {what} that is not registered, so it would never be trained, saved or sharded: "
                    "make it an attribute of the module, or a member of an nn.ModuleList, nn.ModuleDict or "
                    "nn.ParameterList; freeze what is to stay as it is"
                )


def _attributes(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    for each in type(owner).__mro__:
        if each is not object and not each.__module__.startswith("torch."):
            yield from vars(each).items()
    yield from ((key, value) for key, value in vars(owner).items() if key not in _REGISTRIES)


def _held(value: Any, modules: set[int], seen: dict[int, Any]) -> Iterator[Tensor | nn.Module]:
    """Tensors that want gradients, and modules with some, that are found from `value`, but for registered modules."""
    left = deque([value])
    while left:
        each = left.popleft()
        if id(each) in seen or id(each) in modules:
            continue
        seen[id(each)] = each  # kept, so that ids stay theirs
        if isinstance(each, Tensor):
            if each.is_leaf and (each.requires_grad or isinstance(each, nn.Parameter)):
                yield each
        elif isinstance(each, nn.Module):
            if any(parameter.requires_grad for parameter in each.parameters()):
                yield each
        elif not isinstance(each, type | ModuleType):
            left.extend(_inside(each))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
        found = (value.__globals__.get(name) for name in _names(value.__code__))
        yield from (each for each in found if isinstance(each, Tensor | nn.Module))
    elif "__dict__" in dir(value):
        yield from list(vars(value).values())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
