"""The first policy: samples in the order given, in runs of nearly equal length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, SampleMeta


def in_order(graph: ModuleGraph, samples: Sequence[SampleMeta], microbatch_size: int) -> BatchPlan:
    """Cut the batch into microbatches of `microbatch_size` samples per lane of the sink, each into runs per lane.

    Lanes need not divide the samples: the first lanes take one more. The last microbatch may be smaller.
    """
    if microbatch_size < 1:
        raise GraphError(f"a microbatch needs at least 1 sample per lane, got {microbatch_size}")
    size = microbatch_size * graph.sink.num_lanes
    microbatches = [range(i, min(i + size, len(samples))) for i in range(0, max(len(samples), 1), size)]
    lanes = {name: tuple(tuple(_runs(batch, graph[name].num_lanes)) for batch in microbatches) for name in graph.order}
    return BatchPlan(graph, tuple(samples), lanes)


def _runs(items: range, parts: int) -> list[tuple[int, ...]]:
    base, extra = divmod(len(items), parts)
    edges = [i * base + min(i, extra) for i in range(parts + 1)]
    return [tuple(items[a:b]) for a, b in itertools.pairwise(edges)]
