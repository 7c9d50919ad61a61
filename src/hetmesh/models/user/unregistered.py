"""Parameters that a user's module holds where nn.Module does not look: in lists, dicts, closures, class attributes."""

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
    """Raise RecipeError if something in `example` refers to parameters that are not registered, or to registered ones
    outside their name. Modules that are not registered may be there if all of their weights are frozen."""
    names = {id(parameter): name for name, parameter in example.named_parameters()}
    modules = {id(module) for module in example.modules()}
    for owner in example.modules():
        renewed = vars(owner).get("_flat_weights")  # of torch's RNNs
        known: list[Any] = [owner._parameters, owner._buffers, owner._modules, renewed]
        seen = {id(table): table for table in known}
        classes = [base for base in type(owner).__mro__[:-1] if not base.__module__.startswith("torch.")]
        for key, value in (item for holder in (*classes, owner) for item in vars(holder).items()):
            for held in _held(value, modules, seen):
                where = f"{request.key}: {type(owner).__name__}.{key} holds"
                if id(held) in names:
                    raise RecipeError(
                        f"{where} parameter {names[id(held)]} beside its name; when it is sharded, only its name "
                        "gets the shard: look it up in forward"
                    )
                kind = "parameter" if isinstance(held, nn.Parameter) else "tensor with requires_grad"
                kind = f"{type(held).__name__} with parameters" if isinstance(held, nn.Module) else kind
                raise RecipeError(
                    f"{where} a {kind} that is not registered, so it would never be trained, saved or sharded: make it "
                    "an attribute of the module, or a member of an nn.ModuleList, nn.ModuleDict or nn.ParameterList"
                )


def _held(value: Any, modules: set[int], seen: dict[int, Any]) -> Iterator[Tensor | nn.Module]:
    """Tensors that require gradients, and unregistered modules with such parameters, that `value` refers to."""
    left = deque([value])
    while left:
        item = left.popleft()
        if id(item) in seen or id(item) in modules:
            continue
        seen[id(item)] = item  # kept alive, so that no other object gets its id
        if isinstance(item, Tensor):
            if item.is_leaf and (item.requires_grad or isinstance(item, nn.Parameter)):
                yield item
        elif isinstance(item, nn.Module):
            if any(parameter.requires_grad for parameter in item.parameters()):
                yield item
        elif isinstance(item, FunctionType):
            left.extend(_referents(item))
        elif isinstance(item, _LOOKED_INTO):
            left.extend(gc.get_referents(item))


def _referents(function: FunctionType) -> Iterable[Any]:
    """A function's closure and defaults, and the tensors and modules among the globals that it names."""
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    named = [value for value in values if isinstance(value, Tensor | nn.Module)]
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, *named]
