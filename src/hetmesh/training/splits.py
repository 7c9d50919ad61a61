"""Pipeline stages of a recipe's modules: how many, and which layers each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetmesh.cost import ModuleShape, Work
from hetmesh.errors import GraphError, RecipeError
from hetmesh.graph import ModuleGraph, ModuleSpec
from hetmesh.models.adapter import Adapter
from hetmesh.recipe.meshes import table_of
from hetmesh.recipe.sections import ModuleParallelism
from hetmesh.training.default_splits import default_splits
from hetmesh.training.module_shapes import module_shape_of

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

Runs = tuple[tuple[str, ...], ...]
"""Layers of each stage."""


def split_modules(recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> ModuleGraph:
    """`graph` with the stages of every module that has several, what passes between them, and which layers are frozen.

    Raises:
        RecipeError: a module that cannot be split, or not into so many stages, with the key.
    """
    modules = tuple(_split(recipe, graph, m, adapters[m.name]) for m in graph.modules)
    return ModuleGraph(modules, graph.boundaries)


def _split(recipe: Recipe, graph: ModuleGraph, module: ModuleSpec, adapter: Adapter) -> ModuleSpec:
    owner = table_of(recipe, graph, module.name)
    table = ModuleParallelism() if owner is None else recipe.parallelism.modules[owner]
    key, pp = f"parallelism.{owner}", module.mesh.axis_size("pp")
    if owner != module.name:  # it takes the mesh of its consumer's first stage, and is not split
        return module
    given = table.module_fqns_per_model_part
    if pp == 1 and given is None and table.pipeline_parallel_layers_per_stage is None:
        return module
    activation = getattr(adapter, "activation", None)
    if activation is None:
        raise RecipeError(
            f"{key}.pipeline_parallel_degree = {pp}: a {recipe.modules[module.name].model} cannot be split into "
            "stages; give it 1 in a table of its own"
        )
    module = replace(module, activation=activation)
    shape = module_shape_of(recipe, adapter, module.name)
    if shape is not None:
        trained = {layer.name for layer in shape.layers if layer.trainable}
        module = replace(module, frozen_layers=frozenset(module.layers) - trained if module.trainable else frozenset())
    if given is not None:
        runs = tuple(map(tuple, given))
    else:
        layers = len(module.layers) - max(len(getattr(adapter, "first_layers", ())) - 1, 0)
        count = pp * _stages_per_rank(recipe, table, layers, pp)
        runs = _default(recipe, graph, module, adapter, shape, count, key)
    _check_first_stage(runs, adapter, key)
    try:
        return replace(module, splits=runs)
    except GraphError as error:
        raise RecipeError(f"{key}.module_fqns_per_model_part: {error}; layers are {list(module.layers)}") from error


def _stages_per_rank(recipe: Recipe, table: ModuleParallelism, layers: int, pp: int) -> int:
    if (size := table.pipeline_parallel_layers_per_stage) is not None:
        return max(-(-layers // (size * pp)), 1)
    return 2 if recipe.schedule == "interleaved" and pp > 1 and layers >= 2 * pp else 1


def _check_first_stage(runs: Sequence[Sequence[str]], adapter: Adapter, key: str) -> None:
    together = getattr(adapter, "first_layers", ())
    if runs and not set(together) <= set(runs[0]):
        raise RecipeError(f"{key}.module_fqns_per_model_part: the first stage must hold all of {list(together)}")


def _default(
    recipe: Recipe,
    graph: ModuleGraph,
    module: ModuleSpec,
    adapter: Adapter,
    shape: ModuleShape | None,
    count: int,
    key: str,
) -> Runs:
    """Stages of nearly equal time, frozen layers counted as what they cost."""
    if shape is None:
        raise RecipeError(
            f"{key}.pipeline_parallel_degree: the sizes of module {module.name!r} are not known; name the layers of "
            "each stage in module_fqns_per_model_part"
        )
    upstream = any(graph.needs_gradient(b) for b in graph.inputs(module.name))
    first = getattr(adapter, "first_layers", ())
    return default_splits(module, shape, count, upstream_trainable=upstream, work=TYPICAL, together=first)


TYPICAL = Work(rows=2048, pairs=2048 * 512, targets=512)
"""Four samples of 512 tokens, a quarter of which is predicted."""
