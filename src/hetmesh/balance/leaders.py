"""Which modules are balanced, and which go along with another one because they lie on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from hetmesh.graph import ModuleGraph, ModuleSpec


@lru_cache(maxsize=32)
def leaders(graph: ModuleGraph) -> Mapping[str, str]:
    """Per module the one whose lanes and microbatches it takes over: itself, or the only module that it feeds, or that
    feeds it, where both have one mesh. Rows between them then stay where they are."""
    found: dict[str, str] = {}
    for name in reversed(graph.order):
        consumers = {b.destination for b in graph.boundaries if b.source == name}
        found[name] = name
        if len(consumers) == 1 and graph[name].mesh == graph[only := consumers.pop()].mesh:
            found[name] = found[only]
    for name in graph.order:
        producers = {b.source for b in graph.inputs(name)}
        if found[name] == name and name != graph.sink.name and len(producers) == 1:
            only = producers.pop()
            if graph[name].mesh == graph[only].mesh:
                found |= {each: found[only] for each, leader in found.items() if leader == name}
    first: dict[str, str] = {graph.sink.name: graph.sink.name}  # of a group the encoder leads, unless the sink is in it
    for name in graph.order:
        first.setdefault(found[name], name)
    return MappingProxyType({name: first[found[name]] for name in graph.order})


@lru_cache(maxsize=256)
def lane_affinity(module: ModuleSpec, sink: ModuleSpec) -> np.ndarray | None:
    """How many ranks each lane of a module shares with each lane of the sink, int64 `[lanes, lanes of the sink]`; None
    where they share none."""
    own, other = lane_ranks(module), lane_ranks(sink)
    if not set().union(*own) & set().union(*other):
        return None
    lane_of = {rank: lane for lane, ranks in enumerate(other) for rank in ranks}
    out = np.zeros((len(own), len(other)), np.int64)
    for lane, ranks in enumerate(own):
        for rank in ranks:
            if rank in lane_of:
                out[lane, lane_of[rank]] += 1
    out.flags.writeable = False
    return out


def lane_ranks(module: ModuleSpec) -> Sequence[frozenset[int]]:
    """The ranks of each lane of a module."""
    mesh = module.lane_mesh
    array = np.moveaxis(mesh.array, mesh.axes.index("lane"), 0)
    return [frozenset(lane.ravel().tolist()) for lane in array]
