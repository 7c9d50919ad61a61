"""Some lanes of a layout: as many as stand for all of it, so that thousands of ranks are simulated in milliseconds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hetmesh.balance.co_located import lane_ranks
from hetmesh.graph import LANE_AXES, ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec


def some_lanes(graph: ModuleGraph, least: int = 1) -> tuple[ModuleGraph, float]:
    """The first lanes of every module of `graph`, so many that they exchange rows with each other alone where all
    lanes get equally much: of the sink at least `least`, of the others in proportion. Ranks keep their numbers.

    Returns:
        The smaller graph, and the share of the sink's lanes that is in it.
    """
    total = graph.sink.num_lanes
    step = math.lcm(*(total // math.gcd(total, graph[name].num_lanes) for name in graph.order))
    for count in range(step, total, step):
        if count < least:
            continue
        chosen = {name: _taken(graph, name, count) for name in graph.order}
        if all(found is not None for found in chosen.values()):
            modules = [_of_lanes(spec, chosen[spec.name] or []) for spec in graph.modules]
            return ModuleGraph(tuple(modules), graph.boundaries), count / total
    return graph, 1.0


def _taken(graph: ModuleGraph, name: str, count: int) -> list[int] | None:
    """The lanes of a module that go with the first `count` of the sink; None where lanes would be torn apart."""
    own, sink = lane_ranks(graph[name]), lane_ranks(graph.sink)
    if name == graph.sink.name:
        return list(range(count))
    wanted = len(own) * count // len(sink)
    inside, all_of_sink = set().union(*sink[:count]), set().union(*sink)
    if not set().union(*own) & all_of_sink:
        return list(range(wanted))
    found = [i for i, lane in enumerate(own) if lane & inside]
    if len(found) != wanted or any(own[i] & (all_of_sink - inside) for i in found):
        return None
    return found


def _of_lanes(spec: ModuleSpec, lanes: list[int]) -> ModuleSpec:
    """`spec` with some of its lanes, along one data-parallel axis."""
    mesh = spec.lane_mesh
    array = np.take(mesh.array, lanes, mesh.axes.index("lane"))
    axis = next((axis for axis in reversed(LANE_AXES) if axis in spec.mesh.axes), LANE_AXES[0])
    axes = tuple(axis if each == "lane" else each for each in mesh.axes)
    return replace(spec, mesh=MeshSpec(tuple(array.ravel().tolist()), axes, array.shape))
