"""Parameters that a user's module keeps where nn.Module does not look: in lists, dicts, closures, class attributes."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest

_LOOKED_INTO = (list, tuple, set, frozenset, dict, partial, MethodType, CellType, staticmethod, classmethod)


def check_registered(example: nn.Module, request: AdapterRequest) -> None:
    """Raise RecipeError if something in `example` refers to parameters that are not registered, or beside their name.

    Modules that are not registered may be there if all of their weights are frozen.
    """
    names = {id(parameter): name for name, parameter in example.named_parameters()}
    modules = {id(module) for module in example.modules()}
    for owner in example.modules():
        renewed = vars(owner).get("_flat_weights")  # of torch's RNNs
        known: list[Any] = [owner._parameters, owner._buffers, owner._modules, renewed]
        seen = {id(own): own for own in known}
        own_classes = [each for each in type(owner).__mro__[:-1] if not each.__module__.startswith("torch.")]
        for key, value in (item for own in (*own_classes, owner) for item in vars(own).items()):
            for held in _held(value, modules, seen):
                where = f"{request.key}: {type(owner).__name__}.{key} holds"
                if id(held) in names:
                    raise RecipeError(
                        f"{where} parameter {names[id(held)]} beside its name; it gets memory under its name alone, "
                        "when it is sharded: look it up in forward"
                    )
                kind = "parameter" if isinstance(held, nn.Parameter) else "tensor with requires_grad"
                kind = f"{type(held).__name__} with parameters" if isinstance(held, nn.Module) else kind
                raise RecipeError(
                    f"{where} a {kind} that is not registered, so it would never be trained, saved or sharded: make it "
                    "an attribute of the module, or a member of an nn.ModuleList, nn.ModuleDict or nn.ParameterList"
                )


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
        elif isinstance(each, FunctionType):
            left.extend(_of_function(each))
        elif isinstance(each, _LOOKED_INTO):
            left.extend(gc.get_referents(each))


def _of_function(function: FunctionType) -> Iterable[Any]:
    """What it closes over and defaults to, and the tensors and modules among the globals that it names."""
    found = [function.__globals__.get(name) for name in function.__code__.co_names]
    named = [each for each in found if isinstance(each, Tensor | nn.Module)]
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, *named]
