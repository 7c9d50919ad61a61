"""Pipeline stages of a recipe's modules: how many, and which layers each holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetmesh.cost import ModuleShape, Work, layer_flops
from hetmesh.errors import GraphError, RecipeError
from hetmesh.graph import ModuleGraph, ModuleSpec
from hetmesh.models.adapter import Adapter
from hetmesh.training.meshes import table_of
from hetmesh.training.recipe_sections import ModuleParallelism

if TYPE_CHECKING:
    from hetmesh.training.recipe import Recipe

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
    shape = _shape(recipe, module.name, adapter)
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


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Seams of the contiguous partition that minimises the costliest stage, every stage with at least one entry."""
    n, best = len(costs), {}
    total = list(itertools.accumulate(costs, initial=0.0))
    for s in range(1, stages + 1):
        for i in range(s, n + 1):
            if s == 1:
                best[s, i] = (total[i], 0)
            else:
                best[s, i] = min((max(best[s - 1, j][0], total[i] - total[j]), j) for j in range(s - 1, i))
    seams, i = [n], n
    for s in range(stages, 0, -1):
        i = best[s, i][1]
        seams.append(i)
    return seams[::-1]


def _stages_per_rank(recipe: Recipe, table: ModuleParallelism, layers: int, pp: int) -> int:
    if (size := table.pipeline_parallel_layers_per_stage) is not None:
        return max(-(-layers // (size * pp)), 1)
    return 2 if recipe.schedule == "interleaved" and pp > 1 and layers >= 2 * pp else 1


def _shape(recipe: Recipe, name: str, adapter: Adapter) -> ModuleShape | None:
    from hetmesh.training.module_shapes import module_shape_of  # which builds modules, and so needs whole recipes

    return module_shape_of(recipe, adapter, name)


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
    together = getattr(adapter, "first_layers", ())
    units = [tuple(together)] if together else []
    units += [(layer,) for layer in module.layers if layer not in together]
    if len(units) < count:
        raise RecipeError(
            f"{key}.pipeline_parallel_degree: {count} stages for the {len(units)} layers of module {module.name!r}"
        )
    upstream = any(graph.needs_gradient(b) for b in graph.inputs(module.name))
    costs = [1.0] * len(units) if shape is None else _seconds(shape, units, upstream)
    return tuple(
        tuple(layer for unit in units[a:b] for layer in unit) for a, b in itertools.pairwise(partition(costs, count))
    )


def _seconds(shape: ModuleShape, units: Sequence[Sequence[str]], upstream: bool) -> list[float]:
    """Relative time of each unit: FLOPs of forward and backward for typical work."""
    by_name = {layer.name: layer for layer in shape.layers}
    costs = []
    for unit in units:
        cost = 0.0
        for name in unit:
            if (layer := by_name.get(name)) is not None:
                cost += layer_flops(layer, TYPICAL, upstream=upstream).total
                upstream = upstream or layer.trainable
        costs.append(cost)
    return costs


TYPICAL = Work(rows=2048, pairs=2048 * 512, targets=512)
"""Four samples of 512 tokens, a quarter of which is predicted."""
