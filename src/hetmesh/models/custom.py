"""Users' own nn.Modules by import path, as encoders, row-wise modules or sinks.

A class named in a recipe as `model = "package.module:Class"` is constructed with the keys of its `config` table. If
its constructor also takes `in_features`, `out_features`, `media_shape` or `vocab_size` by name, these are filled in
from its neighbours and the data source. Its place in the graph says how it is called:

* encoder (no boundary into it): `forward(media: Tensor[n, *media_shape])` -> rows `[n, rows_per_item, out_features]` or
  `[n * rows_per_item, out_features]`; needs `out_features` and `rows_per_item` as a config key or an attribute;
* row-wise module (one boundary into it): `forward(rows: Tensor[n, in_features])` -> `[n, out_features]`; needs
  `out_features` as a config key, an attribute, or an argument that its constructor takes;
* sink (no boundary out of it): `forward(batch, inputs)` -> logits `[num_targets, vocab]`, with `batch` as
  `hetmesh.models.collate.collate_tokens` describes it, `inputs` the rows by source module, and `in_features` where it
  has a boundary into it.

Class attributes, all optional: `layers` (FQNs in execution order; default: its children), `tensor_parallel_plan` (FQN
pattern -> style) and `tensor_parallel_sizes` (name of a config key or attribute that the degree must divide -> size).
An encoder or row-wise module without input is called with one item or row of zeros, and its result is dropped: it never
sees an empty tensor.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.errors import BoundaryError, RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import NONE, AdapterRequest, SampleLike
from hetmesh.models.collate import collate_media, collate_tokens
from hetmesh.models.config_keys import constructor_arguments, positive_int
from hetmesh.models.pretrained import prefixes


@dataclass(frozen=True)
class CustomAdapter:
    """A user's module: its class and constructor arguments, and what they say about its rows."""

    name: str
    model_class: type[nn.Module]
    arguments: Mapping[str, Any]
    layer_names: tuple[str, ...]
    plan: Mapping[str, Any]
    sizes: Mapping[str, int]
    in_features: int | None = None
    out_features: int | None = None
    checkpoint_names: ClassVar = prefixes("")
    checkpoint_unused: ClassVar = ()
    abilities: ClassVar = NONE

    def build(self) -> nn.Module:
        return self.model_class(**self.arguments)

    def layers(self) -> tuple[str, ...]:
        return self.layer_names

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return self.plan

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return self.sizes

    def item_rows(self, shape: tuple[int, ...]) -> int:
        raise NotImplementedError(f"module {self.name!r} does not read media")

    def rows(self, incoming: int) -> int:
        return incoming

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        return {}

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        (rows,) = inputs.values()
        n = rows.shape[0]
        if n == 0:  # concatenated, so that what emitted no rows stays reachable
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return self._checked(module(rows), max(n, 1))[:n]

    def _checked(self, output: Any, rows: int) -> Tensor:
        if not isinstance(output, Tensor) or output.shape != (rows, self.out_features):
            given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise BoundaryError(f"module {self.name!r} must return shape {(rows, self.out_features)}, got {given}")
        return output


@dataclass(frozen=True)
class CustomEncoder(CustomAdapter):
    """A user's encoder of media items of one shape."""

    media: str = ""
    media_shape: tuple[int, ...] = ()
    rows_per_item: int = 1

    def item_rows(self, shape: tuple[int, ...]) -> int:
        if tuple(shape) != self.media_shape:
            raise SampleError(f"module {self.name!r} reads {self.media_shape} {self.media!r}, got {tuple(shape)}")
        return self.rows_per_item

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        return collate_media(samples, metas, self.media, self.media_shape)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        media = batch["media"]
        parameter = next(module.parameters(), None)
        if media.is_floating_point() and parameter is not None:
            media = media.to(parameter.dtype)
        n = media.shape[0]
        output = module(media if n else media.new_zeros(1, *self.media_shape))
        if isinstance(output, Tensor) and output.ndim == 3:
            output = output.flatten(0, 1)
        return self._checked(output, max(n, 1) * self.rows_per_item)[: n * self.rows_per_item]


@dataclass(frozen=True)
class CustomSink(CustomAdapter):
    """A user's LLM, which gets the whole batch and computes the logits of the targets."""

    sources: Mapping[str, str] = field(default_factory=dict)

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        return collate_tokens(samples, metas, sources=self.sources, placeholders=placeholders, pad_id=pad_id)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        return module(batch, inputs)


def make_custom(model: str, request: AdapterRequest) -> CustomAdapter | None:
    """The adapter of `"package.module:Class"`, or None while a neighbour's width that it needs is not known yet.

    Raises:
        RecipeError: the class cannot be imported or constructed, or misses a size (see the module's docstring).
    """
    model_class = _import(model, request)
    sizes = {
        "in_features": request.in_features,
        "out_features": request.out_features,
        "media_shape": request.media_shape,
        "vocab_size": request.vocab_size,
    }
    arguments, missing = constructor_arguments(request, model_class, sizes)
    if missing and set(missing) <= {"in_features", "out_features"}:
        return None
    if missing:
        raise RecipeError(f"{request.key}.config: the constructor of {model_class.__name__} also needs {missing}")
    example = _example(model_class, arguments, request)
    get = lambda key, default=None: arguments.get(key, getattr(example, key, default))  # noqa: E731
    adapter = CustomAdapter(
        request.name,
        model_class,
        arguments,
        tuple(getattr(example, "layers", ())) if _is_names(getattr(example, "layers", None)) else _children(example),
        dict(getattr(example, "tensor_parallel_plan", {})),
        dict(getattr(example, "tensor_parallel_sizes", {})),
    )
    if not request.consumers:
        width = _size(request, get, "in_features") if request.placeholders else None
        return CustomSink(**{**_fields(adapter), "in_features": width, "sources": request.sources})
    adapter = replace(adapter, out_features=_size(request, get, "out_features"))
    if not request.placeholders:
        shape = get("media_shape", request.media_shape)
        if request.media is None or shape is None:
            raise RecipeError(f"{request.key}: an encoder needs `media` and a `media_shape` (config key or attribute)")
        return CustomEncoder(
            **_fields(adapter),
            media=request.media,
            media_shape=tuple(shape),
            rows_per_item=_size(request, get, "rows_per_item"),
        )
    if len(request.placeholders) != 1:
        raise RecipeError(f"{request.key}: a row-wise module has exactly one boundary into it")
    width = get("in_features", request.in_features)
    return None if width is None else replace(adapter, in_features=positive_int(request, "in_features", width))


def _size(request: AdapterRequest, get: Any, key: str) -> int:
    value = get(key)
    if value is None:
        raise RecipeError(f"{request.key}.config.{key}: missing; give it here or as an attribute of the class")
    return positive_int(request, key, value)


def _fields(adapter: CustomAdapter) -> dict[str, Any]:
    values = vars(adapter)
    return {each.name: values[each.name] for each in fields(CustomAdapter)}


def _is_names(value: Any) -> bool:  # a module may well hold its blocks in a ModuleList called `layers`
    return isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value)


def _children(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_children())


def _import(path: str, request: AdapterRequest) -> type[nn.Module]:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{request.key}.model: cannot import {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise RecipeError(f"{request.key}.model: {path!r} is not a subclass of torch.nn.Module")
    return found


def _example(model_class: type[nn.Module], arguments: Mapping[str, Any], request: AdapterRequest) -> nn.Module:
    """An instance without memory, to read attributes from."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return model_class(**arguments)
    except Exception as error:
        raise RecipeError(
            f"{request.key}: {model_class.__name__}({_listed(arguments)}) failed: {error}; it is first constructed on "
            "the meta device, so its constructor must not read values of its parameters"
        ) from error


def _listed(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
