"""Where a module is cut into pipeline stages when the recipe does not say: evenly by what its layers cost."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.cost import ModuleShape, Rates, Work, module_times, partition
from hetmesh.cost.partition import runs
from hetmesh.errors import RecipeError


@lru_cache(maxsize=1024)
def default_splits(
    shape: ModuleShape,
    stages: int,
    *,
    upstream_trainable: bool,
    work: Work,
    together: tuple[str, ...] = (),
    recomputed: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """The layers of each stage of a module.

    The slowest stage, forward and backward of what is trained, is as fast as possible (`hetmesh.cost.partition`).
    Layers without FLOPs (embeddings, norms) go with the layer before them, the first ones with the layer after them,
    unless there are too few others.

    Args:
        upstream_trainable: whether a module that feeds this one, directly or not, is trainable.
        work: what a typical microbatch gives one lane to do: the balance of blocks and head depends on it.
        together: the first layers, where they must share a stage.
        recomputed: whether the backward computes its blocks again.

    Raises:
        RecipeError: more stages than layers.
    """
    layers = [layer.name for layer in shape.layers if layer.name]
    most = len(layers) - max(len(together) - 1, 0)
    if not 1 <= stages <= most:
        shared = f", of which {list(together)} share a stage" if together else ""
        raise RecipeError(
            f"parallelism.{shape.name}: {stages} pipeline stages for {len(layers)} layers{shared}; valid are 1 to "
            f"{most}"
        )
    times = module_times(shape, work, Rates(1.0), upstream=upstream_trainable, recompute=layers if recomputed else [])
    costs = [times[layer].forward + times[layer].backward for layer in layers]
    units = _joined(_units(costs), len(together))
    if len(units) < stages:
        units = _joined([[i] for i in range(len(layers))], len(together))
    counts = partition([sum(costs[i] for i in unit) for unit in units], stages)
    return tuple(tuple(layers[i] for unit in run for i in unit) for run in runs(units, counts))


def _joined(units: list[list[int]], first: int) -> list[list[int]]:
    """`units` with those that hold any of the `first` layers made one."""
    ahead = [i for unit in units if unit[0] < first for i in unit]
    return [*([ahead] if ahead else []), *(unit for unit in units if unit[0] >= first)]


def _units(costs: list[float]) -> list[list[int]]:
    """Runs of layers that stay together: each has one that costs something."""
    units: list[list[int]] = [[]]
    for i, cost in enumerate(costs):
        if cost and any(costs[j] for j in units[-1]):
            units.append([])
        units[-1].append(i)
    return units
