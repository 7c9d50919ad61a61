"""Where a chain of layers is cut into pipeline stages: the slowest stage as fast as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from hetmesh.cost.layer_time import Rates, module_times
from hetmesh.cost.shapes import ModuleShape
from hetmesh.cost.work import Work
from hetmesh.errors import GraphError, RecipeError

Ties = Literal["even", "early", "late"]
"""Which of the cuts with the fastest slowest stage: the one with the least sum of squared stage costs, and of those the
one whose earlier stages take fewer layers; or the one whose earlier stages take as many layers as they can, the first
before the second and so on; or as few as they can."""


def partition(costs: Sequence[float], stages: int, *, ties: Ties = "even") -> tuple[int, ...]:
    """How many consecutive layers each stage takes, at least one.

    The slowest stage is as fast as possible; of such cuts, `ties` says which: the most even one, and earlier stages
    take fewer layers (they hold more microbatches at a time). Exact, by dynamic programming in
    O(stages x layers^2).

    Args:
        costs: seconds of each layer, forward and backward.
        ties: see `Ties`.

    Raises:
        GraphError: more stages than layers, or there is no such rule for ties.
    """
    if not 1 <= stages <= len(costs):
        raise GraphError(f"cannot cut {len(costs)} layers into {stages} stages; valid are 1 to {len(costs)}")
    if ties not in get_args(Ties):
        raise GraphError(f"ties of cuts: there is no rule {ties!r}; valid are {', '.join(get_args(Ties))}")
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    between = prefix[None, :] - prefix[:, None]  # [start, stop]: the cost of a stage of these layers
    each = np.where(np.triu(np.ones_like(between, dtype=bool), 1), between, np.inf)
    # Costs of one cut may differ in the last bit by how they were summed; a bottleneck is not missed for that.
    within = float(_best(each, stages, np.maximum)[0][0]) * (1 + 1e-12)
    squares = np.where(each <= within, each ** (2 if ties == "even" else 0), np.inf)
    best = _best(squares, stages, np.add)
    counts, start = [], 0
    for stage in range(stages):
        total = squares[start] + best[stage + 1]
        least = float(total.min())
        stop = int(np.flatnonzero(total <= least * (1 + 1e-12))[-1 if ties == "early" else 0])
        counts.append(stop - start)
        start = stop
    return tuple(counts)


def runs(items: Sequence, counts: Sequence[int]) -> Iterator[tuple]:
    """`items` cut into runs of `counts`."""
    start = 0
    for count in counts:
        yield tuple(items[start : start + count])
        start += count


def _best(each: np.ndarray, stages: int, combine: np.ufunc) -> list[np.ndarray]:
    """Per stage and start layer, the least combined cost of it and all later stages; `[stages + 1][n + 1]`. `each`: of
    a stage by where it starts and stops, `[n + 1, n + 1]`."""
    best = [np.full(len(each), np.inf)]
    best[0][-1] = 0.0
    for _ in range(stages):
        best.insert(0, combine(each, best[0][None, :]).min(axis=1))
    return best


@lru_cache(maxsize=1024)
def default_splits(
    shape: ModuleShape,
    stages: int,
    *,
    upstream_trainable: bool,
    work: Work,
    together: tuple[str, ...] = (),
    ending: tuple[str, ...] = (),
    recomputed: bool = False,
    seconds: tuple[float, ...] = (),
) -> tuple[tuple[str, ...], ...]:
    """The layers of each stage of a module.

    The slowest stage, forward and backward of what is trained, is as fast as possible (`hetmesh.cost.stage_cuts`).
    Layers without FLOPs (embeddings, norms) go with the layer before them, the first ones with the layer after them,
    unless there are too few others.

    Args:
        upstream_trainable: whether a module that feeds this one, directly or not, is trainable.
        work: what a typical microbatch gives one lane to do: the balance of blocks and head depends on it.
        together, ending: the first and the last layers, where they must share a stage.
        recomputed: whether the backward computes its blocks again.
        seconds: what each named layer takes in forward and backward; empty: in proportion to FLOPs.

    Raises:
        RecipeError: more stages than layers.
    """
    layers = [layer.name for layer in shape.layers if layer.name]
    most = len(layers) - max(len(together) - 1, 0) - max(len(ending) - 1, 0)
    if not 1 <= stages <= most:
        shared = "".join(f", of which {list(each)} share a stage" for each in (together, ending) if each)
        raise RecipeError(
            f"parallelism.{shape.name}: {stages} pipeline stages for {len(layers)} layers{shared}; valid are 1 to "
            f"{most}"
        )
    times = module_times(shape, work, Rates(1.0), upstream=upstream_trainable, recompute=layers if recomputed else [])
    costs = [times[layer].forward + times[layer].backward for layer in layers]
    ends = len(together), len(layers) - len(ending)
    units = _joined(_units(costs), *ends)
    if len(units) < stages:
        units = _joined([[i] for i in range(len(layers))], *ends)
    counts = partition([sum((seconds or costs)[i] for i in unit) for unit in units], stages)
    return tuple(tuple(layers[i] for unit in run for i in unit) for run in runs(units, counts))


def _joined(units: list[list[int]], first: int, last: int) -> list[list[int]]:
    """`units` with those that hold any of the `first` layers made one, and those that hold any from `last` on."""
    ahead = [i for unit in units if unit[0] < first for i in unit]
    behind = [i for unit in units if unit[0] >= first and unit[-1] >= last for i in unit]
    between = [unit for unit in units if unit[0] >= first and unit[-1] < last]
    return [part for part in (ahead, *between, behind) if part]


def _units(costs: list[float]) -> list[list[int]]:
    """Runs of layers that stay together: each has one that costs something."""
    units: list[list[int]] = [[]]
    for i, cost in enumerate(costs):
        if cost and any(costs[j] for j in units[-1]):
            units.append([])
        units[-1].append(i)
    return units
