"""What the class of a user's nn.Module declares: attributes -> `Abilities`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import Abilities, AdapterRequest
from hetmesh.models.user.adapters import sharded_layers


def declared_layers(example: nn.Module, request: AdapterRequest) -> tuple[str, ...]:
    """`layers`, or the children of the module, of which a ModuleList stands for its members."""
    layers: Any = getattr(example, "layers", None)
    if not _is_names(layers):  # a module may well hold its blocks in a ModuleList called `layers`
        return tuple(
            name if at is None else f"{name}.{at}"
            for name, child in example.named_children()
            for at in (range(len(child)) if isinstance(child, nn.ModuleList) else (None,))
        )
    names = {name for name, _ in example.named_modules()}
    wrong = [layer for layer in layers if layer not in names]
    if wrong or len(set(layers)) < len(layers):
        problem = f"{wrong} are no submodules" if wrong else "a name is there twice"
        raise _error(request, example, "layers", list(layers), f"{problem}; submodules: {sorted(names - {''})[:20]}")
    return tuple(layers)


def declared_abilities(example: nn.Module, layers: tuple[str, ...], request: AdapterRequest) -> Abilities:
    """What the module can do beyond being called whole."""
    kind, sink = type(example).__name__, not request.consumers
    page = "see hetmesh/models/user/README.md"
    return Abilities(
        activation=_activation(example, request, padded=sink),
        token_sharded=_token_sharded(example, layers, request),
        use_packed=_nothing_to_prepare if sink and _flag(example, "packed_attention", request) else None,
        reasons={
            "activation": f"{kind} declares no `activation`, what passes between its layers; {page}",
            "token_sharded": f"{kind} declares no `token_sharded`, its layers that work on a share of the tokens; "
            f"{page}",
            "use_packed": f"{kind} does not declare `packed_attention = True`; {page}",
        },
    )


def _activation(example: nn.Module, request: AdapterRequest, *, padded: bool) -> Activation | None:
    given = getattr(example, "activation", None)
    if given is None or isinstance(given, str) or callable(given):  # a non-linearity, or its name
        return None
    if "hidden" not in inspect.signature(example.forward).parameters:
        problem = "then forward must take `hidden=None`, what the pipeline stage before returned"
        raise _error(request, example, "activation", given, problem)
    if type(given) is int and given > 0:
        return Activation(given, padded=padded)
    if isinstance(given, Activation) and given.padded == padded:
        return given
    tokens = "all tokens (padded=True)" if padded else "the rows that the module emits (padded=False)"
    problem = f"must be a width, or a hetmesh.models.Activation whose rows are {tokens}"
    raise _error(request, example, "activation", given, problem)


def _token_sharded(example: nn.Module, layers: tuple[str, ...], request: AdapterRequest) -> tuple[str, ...]:
    given = getattr(example, "token_sharded", ())
    if not _is_names(given):
        raise _error(request, example, "token_sharded", given, "must be names of layers, or of what holds some")
    inside = sharded_layers(layers, tuple(given))
    unknown = [name for name in given if not sharded_layers(layers, (name,))]
    at = layers.index(inside[0]) if inside else 0
    if unknown or layers[at : at + len(inside)] != inside:
        problem = f"{unknown} hold no layer" if unknown else f"{list(inside)} do not follow each other"
        raise _error(request, example, "token_sharded", list(given), f"{problem}; layers are {list(layers)}")
    return tuple(given)


def _flag(example: nn.Module, name: str, request: AdapterRequest) -> bool:
    given = getattr(example, name, False)
    if not isinstance(given, bool):
        raise _error(request, example, name, given, "must be True or False")
    return given


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)


def _nothing_to_prepare(module: nn.Module) -> None:
    """The module reads the attention of packed samples from its batch."""


def _error(request: AdapterRequest, example: nn.Module, name: str, given: object, problem: str) -> RecipeError:
    return RecipeError(f"{request.key}: {type(example).__name__}.{name} = {given!r}: {problem}")
