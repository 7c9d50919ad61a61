"""The batches that a run should fear most: what it could draw at worst, from the samples that were looked at."""

from __future__ import annotations

import numpy as np

from hetmesh.cost.work import samples_work
from hetmesh.graph import MetaArrays, ModuleGraph


def largest_batches(graph: ModuleGraph, samples: MetaArrays, size: int) -> list[MetaArrays]:
    """Global batches of `size` samples, each of those that give one module most rows, or the sink most targets: what is
    kept grows with these. A batch of only such samples is a bound for all that can be drawn from `samples`: chance
    rarely puts them together. Of equal samples the earlier ones count, so that it is deterministic; fewer samples than
    `size` come again from the largest on.

    Args:
        samples: expanded metadata, at least one.
    """
    found: dict[tuple[int, ...], None] = {}
    for name in graph.order:
        for measure in samples_work(graph, name, samples).T[[0, 2]]:
            if measure.any():
                order = np.argsort(-measure, kind="stable")[:size]
                found[tuple(np.resize(order, size).tolist())] = None
    return [samples.take(chosen) for chosen in found]
