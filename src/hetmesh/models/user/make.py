"""`model = "package.module:Class"`: a user's nn.Module or Adapter as a module of a graph; see README.md."""

from __future__ import annotations

import gc
import inspect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hetmesh._own_code import import_named
from hetmesh.errors import RecipeError
from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import Abilities, Adapter, AdapterRequest
from hetmesh.models.config_keys import constructor_arguments, positive_int
from hetmesh.models.generator import generator_place
from hetmesh.models.user.adapters import (
    UserAdapter,
    UserEncoder,
    UserGenerator,
    UserItemsEncoder,
    UserLlm,
    sharded_layers,
)
from hetmesh.models.user.layer_probes import enters_layers_once, first_layers
from hetmesh.models.user.probe import check_packing, check_samples, check_token_shares
from hetmesh.models.weights.build import random_state

_PROTOCOL = frozenset(name for name in dir(Adapter) if not name.startswith("_"))


def make_user_adapter(model: str, request: AdapterRequest) -> Adapter | None:
    """The adapter of `"package.module:Class"`; None while it needs the width of a neighbour that is not known yet.
    Raises RecipeError if the class cannot be imported or constructed, lacks a size, or does not do what it declares."""
    imported = _import(model, request)
    if issubclass(imported, nn.Module):
        return _adapter_of_module(imported, request)
    return _users_adapter(imported, model, request)


def _users_adapter(imported: type, model: str, request: AdapterRequest) -> Adapter | None:
    make = getattr(imported, "make", None)
    if not callable(make):
        raise RecipeError(
            f"{request.key}.model: {model!r} is neither a torch.nn.Module nor an adapter: an adapter's class has a "
            "classmethod make(request), which gets a hetmesh.models.AdapterRequest and returns the adapter"
        )
    adapter = make(request)
    missing = sorted(_PROTOCOL - set(dir(adapter))) if adapter is not None else []
    if missing:
        raise RecipeError(
            f"{request.key}.model: {model!r}: what its make(request) returned, a {type(adapter).__name__}, is not a "
            f"hetmesh.models.Adapter: it lacks {missing}"
        )
    return adapter


def _adapter_of_module(model_class: type[nn.Module], request: AdapterRequest) -> UserAdapter | None:
    sizes = {
        "in_features": request.in_features,
        "out_features": request.out_features,
        "media_shape": request.media_shape,
        "vocab_size": request.vocab_size,
    }
    place: dict[str, Any] = {}
    if request.generates:
        if (found := generator_place(request, model_class.__name__)) is None:
            return None
        shape = found["media_shape"] or (1,)
        place = {"latents": math.prod(shape[:-1]), "width": shape[-1], **found}
        sizes["out_features"] = place["width"]
    arguments, missing = constructor_arguments(request, model_class, sizes)
    if missing and set(missing) <= {"in_features", "out_features"}:
        return None
    if missing:
        raise RecipeError(f"{request.key}.config: the constructor of {model_class.__name__} also needs {missing}")
    example = _example(model_class, arguments, request)
    check_registered(example, request)
    adapter = _adapter(model_class, arguments, example, request, place)
    if adapter is None:
        return None
    abilities = adapter.abilities
    if abilities.token_sharded:
        check_token_shares(adapter, example, request)
    if isinstance(adapter, UserLlm) and abilities.use_packed is not None:
        check_packing(adapter, example, request)
    reason = check_samples(adapter, example, request) or ""
    abilities = replace(abilities, gathered_whole=not enters_layers_once(adapter, example, request.vocab_size))
    adapter = replace(adapter, reason_not_probed=reason, abilities=abilities)
    if abilities.activation is None:
        return adapter
    # Last: it takes the example apart.
    return replace(adapter, abilities=replace(abilities, first_layers=first_layers(adapter, example, request)))


def _adapter(
    model_class: type[nn.Module],
    arguments: Mapping[str, Any],
    example: nn.Module,
    request: AdapterRequest,
    place: Mapping[str, Any],
) -> UserAdapter | None:
    get = lambda key, default=None: arguments.get(key, getattr(example, key, default))  # noqa: E731
    layers = declared_layers(example, request)
    common: dict[str, Any] = {
        "name": request.name,
        "model_class": model_class,
        "arguments": arguments,
        "layer_names": layers,
        "plan": dict(getattr(example, "tensor_parallel_plan", {})),
        "sizes": dict(getattr(example, "tensor_parallel_sizes", {})),
        "abilities": declared_abilities(example, layers, request),
    }
    if request.hidden:
        raise RecipeError(
            f"{request.key}: {request.model} is a custom LLM, which returns logits alone, and "
            f"{list(request.consumers)} read hidden states; take a ready-made one, or hf_llm"
        )
    if place:
        return _generator(example, common, {**place, "queries": _size(request, get, "queries")}, request)
    if not request.consumers:
        width = _size(request, get, "in_features") if request.placeholders else None
        return UserLlm(**common, in_features=width, sources=request.sources)
    common["out_features"] = _size(request, get, "out_features")
    if not request.placeholders:
        return _encoder(example, common, get, request)
    if len(request.placeholders) != 1:
        raise RecipeError(f"{request.key}: a row-wise module has exactly one boundary into it")
    width = get("in_features", request.in_features)
    return None if width is None else UserAdapter(**common, in_features=positive_int(request, "in_features", width))


def _generator(
    example: nn.Module, common: dict[str, Any], place: dict[str, Any], request: AdapterRequest
) -> UserGenerator:
    if common["abilities"].activation is not None or common["abilities"].token_sharded:
        raise RecipeError(
            f"{request.key}: {type(example).__name__} declares `activation` or `token_sharded`, which do nothing "
            "after the LLM: write an adapter, see hetmesh/models/user/README.md"
        )
    flows = getattr(example, "flows", False)
    if not isinstance(flows, bool):
        raise _error(request, example, "flows", flows, "must be True or False")
    common["abilities"] = Abilities(reasons=common["abilities"].reasons)
    steps = getattr(example, "sampling_steps", UserGenerator.steps)
    made = UserGenerator(**common | place, steps=steps, flows=flows)
    return replace(made, abilities=made.of_flow(reasons=common["abilities"].reasons)) if flows else made


def _encoder(example: nn.Module, common: dict[str, Any], get: Any, request: AdapterRequest) -> UserAdapter:
    shape = get("media_shape", request.media_shape)
    if request.media is None or shape is None:
        raise RecipeError(f"{request.key}: an encoder needs `media` and a `media_shape` (config key or attribute)")
    sizer = getattr(example, "item_rows", None)
    if sizer is None:
        rows = _size(request, get, "rows_per_item")
        return UserEncoder(**common, media=request.media, media_shape=tuple(shape), rows_per_item=rows)
    for name, declared in (
        ("activation", common["abilities"].activation),
        ("token_sharded", common["abilities"].token_sharded),
        ("rows_per_item", get("rows_per_item")),
    ):
        if declared:
            raise RecipeError(
                f"{request.key}: {type(example).__name__} declares `item_rows`, for items of several shapes, and "
                f"`{name}`, which needs items of one shape; leave out one of them"
            )
    adapter = UserItemsEncoder(**common, media=request.media, blank=tuple(shape), sizer=sizer)
    adapter.item_rows(tuple(shape))
    return adapter


def _size(request: AdapterRequest, get: Any, key: str) -> int:
    value = get(key)
    if value is None:
        raise RecipeError(f"{request.key}.config.{key}: missing; give it here or as an attribute of the class")
    return positive_int(request, key, value)


def _import(path: str, request: AdapterRequest) -> type:
    try:
        found = import_named(path, request.folder)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{request.key}.model: cannot import {path!r}: {error}") from error
    if not isinstance(found, type):
        raise RecipeError(
            f"{request.key}.model: {path!r} is not a subclass of torch.nn.Module, nor an adapter's class, but a "
            f"{type(found).__name__}"
        )
    return found


def _example(model_class: type[nn.Module], arguments: Mapping[str, Any], request: AdapterRequest) -> nn.Module:
    """An instance on the meta device, to read attributes from."""
    try:
        with random_state(request.name, 0), torch.device("meta"):
            example = model_class(**arguments)
    except Exception as error:
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise RecipeError(
            f"{request.key}: {model_class.__name__}({listed}) failed: {error}; it is first constructed on "
            "the meta device, so its constructor must not read values of its parameters"
        ) from error
    if lazy := [name for name, p in example.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise RecipeError(
            f"{request.key}: {model_class.__name__} makes its parameters {lazy[:4]} lazily, in its first forward, but "
            "they are sharded before that: give its layers their sizes (in_features and media_shape are filled in "
            "where the constructor takes them)"
        )
    return example


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
    kind, llm = type(example).__name__, not request.consumers and not request.generates
    packed = getattr(example, "packed_attention", False)
    if llm and not isinstance(packed, bool):
        raise _error(request, example, "packed_attention", packed, "must be True or False")
    page = "see hetmesh/models/user/README.md"
    return Abilities(
        activation=_activation(example, request, padded=llm),
        token_sharded=_token_sharded(example, layers, request),
        use_packed=(lambda _: None) if llm and packed else None,  # it reads the attention of samples from its batch
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


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)


def _error(request: AdapterRequest, example: nn.Module, name: str, given: object, problem: str) -> RecipeError:
    return RecipeError(f"{request.key}: {type(example).__name__}.{name} = {given!r}: {problem}")
