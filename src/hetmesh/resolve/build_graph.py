"""The ModuleGraph of a recipe: built once, from the recipe's wiring and the adapters of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetmesh.errors import GraphError, RecipeError, Refusals
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.models import Adapter, with_side_outputs
from hetmesh.recipe.module_options import module_options, packs, token_assignment, token_axes
from hetmesh.resolve.splits import module_splits

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe


def build_graph(recipe: Recipe, adapters: Mapping[str, Adapter]) -> ModuleGraph:
    """The graph of the recipe's modules on their meshes, with layers, stages and side outputs.

    Raises:
        RecipeError: of every module that cannot be split, or not so, and of every side output that nobody takes, with
            the key.
    """
    refusals = Refusals()
    boundaries: tuple[BoundarySpec, ...] = ()
    with refusals.collect():
        boundaries = with_side_outputs(recipe.wiring.topology.boundaries, adapters)
    modules: list[ModuleSpec] = []
    for name in recipe.modules:
        with refusals.collect():
            modules.append(_module(recipe, name, adapters))
    refusals.finish()
    return ModuleGraph(tuple(modules), boundaries)


def _module(recipe: Recipe, name: str, adapters: Mapping[str, Adapter]) -> ModuleSpec:
    own, axes, adapter = recipe.modules[name], token_axes(recipe, name), adapters[name]
    layers = adapter.layers()
    shares_media = recipe.wiring.media[name] is not None and "cp" in axes
    splits = module_splits(recipe, name, adapters)
    try:
        return ModuleSpec(
            name,
            recipe.wiring.meshes[name],
            layers,
            recipe.wiring.media[name],
            own.trainable,
            features=adapter.out_features or 0,
            token_axes=axes,
            tokens_per_row=adapter.abilities.tokens_per_row if shares_media else 0,
            packed=packs(recipe, name),
            attention_mask=own.attention_mask,
            assignment=token_assignment(recipe, name),
            splits=splits.runs,
            activation=splits.activation,
            frozen_layers=splits.frozen_layers,
            options=module_options(recipe, name),
        )
    except GraphError as error:
        raise RecipeError(
            f"parallelism.{name}.module_fqns_per_model_part: {error}; layers are {list(layers)}"
        ) from error
