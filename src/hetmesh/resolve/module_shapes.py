"""The sizes of a recipe's modules, adapters and frozen parts included, without allocating a weight."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import torch

from hetmesh.cost import ModuleShape
from hetmesh.models import Adapter, lora_plan
from hetmesh.models.module_shape import module_shape
from hetmesh.resolve.modules import empty_module

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe


def module_shapes(recipe: Recipe, adapters: Mapping[str, Adapter]) -> dict[str, ModuleShape | None]:
    """Per module its sizes; None for one that cannot be built on the meta device."""
    return {name: module_shape_of(recipe, adapter, name) for name, adapter in adapters.items()}


def notes_on_experts(shapes: Mapping[str, ModuleShape | None]) -> tuple[str, ...]:
    """What is assumed of the experts of modules, and what of them is not counted."""
    notes = []
    for name, shape in shapes.items():
        if shape is not None and shape.has_experts:
            notes.append(f"experts of {name}: their routing, which depends on weights, is taken to be even")
        if shape is not None and shape.uncounted:
            notes.append(
                f"not counted in FLOPs and seconds: the products of the experts of {name} ({shape.uncounted[0]}, ...), "
                "whose model does not say how many a token chooses"
            )
    return tuple(notes)


# By the id of an adapter, which may have no hash, as long as it lives: who splits, balances and ties a module asks too.
_known: dict[int, dict[Hashable, ModuleShape | None]] = {}


def module_shape_of(recipe: Recipe, adapter: Adapter, name: str) -> ModuleShape | None:
    """The sizes of one module; None for one that cannot be built on the meta device. Built once for each adapter."""
    if id(adapter) not in _known:
        _known[id(adapter)] = {}
        weakref.finalize(adapter, _known.pop, id(adapter)).atexit = False
    known, key = _known[id(adapter)], (name, recipe.modules[name], recipe.training.dtype)
    if key not in known:
        known[key] = _built_shape(recipe, adapter, name)
    return known[key]


def _built_shape(recipe: Recipe, adapter: Adapter, name: str) -> ModuleShape | None:
    try:
        with torch.device("meta"):
            module = empty_module(recipe, adapter, name).module
    except Exception:  # a user's constructor may compute with its weights
        return None
    plan = lora_plan(module, {**adapter.tensor_parallel_plan(), **recipe.modules[name].plan})
    return module_shape(name, adapter, module, plan)
