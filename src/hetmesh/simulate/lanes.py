"""Lanes that act apart: data-parallel lanes of a stage start when their own ranks are free, if no collective joins
them, and wait for those lanes alone whose rows they get. Replicas that are equal are simulated once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetmesh.balance import BatchPlan
from hetmesh.cost import Lanes, StageCost
from hetmesh.graph import LANE_AXES, ModuleSpec, Route, Stage
from hetmesh.schedule import Schedule

Groups = Mapping[Stage, tuple[tuple[int, ...], ...]]
Flows = Mapping[Route, tuple[tuple[int, int], ...]]
Costs = Mapping[tuple[Stage, int], tuple[StageCost, ...]]
Node = tuple[Stage, int]
"""One set of ranks of a stage."""


def lane_groups(spec: ModuleSpec) -> tuple[int, ...]:
    """Per lane of a module the number of its group. FSDP's lanes gather parameters in every layer, unless these stay
    whole during a step, and lanes that hold different experts exchange tokens: those that do so together start
    together; all others go on alone."""
    shards = spec.lanes_together
    names = [axis for axis in spec.mesh.axes if axis in LANE_AXES]
    if shards == 1 or names[-1:] not in (["dp_shard"], ["ep"]):
        return tuple(range(spec.num_lanes)) if shards == 1 else (0,) * spec.num_lanes
    return tuple(lane // shards for lane in range(spec.num_lanes))


def group_ranks(spec: ModuleSpec, stage: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group of one stage, ascending."""
    mesh = spec.stage_mesh(stage).merge(LANE_AXES, "lane")
    of_lane = lane_groups(spec)
    if "lane" not in mesh.axes:
        return (tuple(sorted(mesh.ranks)),)
    lanes = np.moveaxis(mesh.array, mesh.axes.index("lane"), 0).reshape(len(of_lane), -1)
    found: list[list[int]] = [[] for _ in range(max(of_lane) + 1)]
    for lane, group in enumerate(of_lane):
        found[group] += lanes[lane].tolist()
    return tuple(tuple(sorted(ranks)) for ranks in found)


def plan_flows(plan: BatchPlan, schedule: Schedule) -> dict[Route, tuple[tuple[int, int], ...]]:
    """Per route between modules, which groups of its source have rows for which groups of its destination."""
    placed = {name: _places(plan, name) for name in plan.graph.order}
    found: dict[tuple[str, str], dict[tuple[int, int], tuple[tuple[int, int], ...]]] = {}
    flows: dict[Route, tuple[tuple[int, int], ...]] = {}
    for edge in schedule.stages.edges:
        if edge.internal:
            continue
        ends = edge.source.module, edge.destination.module
        if ends not in found:
            moved = plan.row_counts(plan.graph.boundary(*ends, edge.output)) > 0
            columns = np.concatenate([placed[ends[0]][:, moved], placed[ends[1]][:, moved]])
            pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for m, source, to, destination in np.unique(columns, axis=1).T.tolist():
                pairs.setdefault((m, to), []).append((source, destination))
            found[ends] = {key: tuple(exchanged) for key, exchanged in pairs.items()}
        for route in schedule.routes.along(edge):
            flows[route] = found[ends].get((route.source, route.destination), ())
    return flows


def _places(plan: BatchPlan, name: str) -> np.ndarray:
    """Microbatch and group of every sample in one module; int64 `[2, samples]`."""
    of_lane = lane_groups(plan.graph[name])
    out = np.zeros((2, len(plan.samples)), np.int64)
    for m, lanes in enumerate(plan.lanes[name]):
        for lane, samples in enumerate(lanes):
            out[:, list(samples)] = [[m], [of_lane[lane]]]
    return out


def merge_equal_replicas(groups: Groups, flows: Flows, costs: Costs) -> Lanes | None:
    """The groups with equal replicas made one; None where every stage is then a single group.

    A replica is what shares ranks or exchanges rows. Two are equal where every stage costs the same in every
    microbatch, and rows go the same ways.
    """
    parts = _replicas(groups, flows)
    number = {node: (p, i) for p, part in enumerate(parts) for i, node in enumerate(part)}
    of_part: list[list[tuple[Route, int, int]]] = [[] for _ in parts]
    for route, pairs in flows.items():
        for source, destination in pairs:
            p, i = number[route.edge.source, source]
            of_part[p].append((route, i, number[route.edge.destination, destination][1]))
    priced: dict[Stage, list[int]] = {}
    for stage, m in costs:
        priced.setdefault(stage, []).append(m)
    first: dict[tuple, int] = {}
    same: dict[int, list[int]] = {}
    for p, part in enumerate(parts):
        key = (
            tuple((stage, tuple(costs[stage, m][g] for m in priced.get(stage, ()))) for stage, g in part),
            tuple(sorted(of_part[p])),
            _shared(part, groups),
        )
        same.setdefault(first.setdefault(key, p), []).append(p)
    kept: dict[Stage, list[int]] = {stage: [] for stage in groups}
    ranks: dict[Node, list[int]] = {}
    for p, others in same.items():
        for i, (stage, g) in enumerate(parts[p]):
            kept[stage].append(g)
            ranks[stage, g] = sorted(r for other in others for r in groups[stage][parts[other][i][1]])
    if all(len(lanes) == 1 for lanes in kept.values()):
        return None
    kept = {stage: sorted(lanes) for stage, lanes in kept.items()}
    place = {(stage, g): i for stage, lanes in kept.items() for i, g in enumerate(lanes)}
    return Lanes(
        {stage: tuple(tuple(ranks[stage, g]) for g in lanes) for stage, lanes in kept.items()},
        {
            route: tuple(
                (place[route.edge.source, a], place[route.edge.destination, b])
                for a, b in pairs
                if (route.edge.source, a) in place
            )
            for route, pairs in flows.items()
        },
        {(stage, m): tuple(of_lanes[g] for g in kept[stage]) for (stage, m), of_lanes in costs.items()},
    )


def _replicas(groups: Groups, flows: Flows) -> list[list[Node]]:
    """Groups that share ranks or exchange rows, together; of one module the groups of equal number always do."""
    parent: dict[object, object] = {}

    def root(x: object) -> object:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    nodes = [(stage, g) for stage, sets in groups.items() for g in range(len(sets))]
    for stage, g in nodes:
        for rank in groups[stage][g]:
            parent[root(rank)] = root((stage, g))
        parent[root((stage.module, g))] = root((stage, g))
    for ends in {(r.edge.source, a, r.edge.destination, b) for r, pairs in flows.items() for a, b in pairs}:
        parent[root(ends[:2])] = root(ends[2:])
    parts: dict[object, list[Node]] = {}
    for node in nodes:
        parts.setdefault(root(node), []).append(node)
    return list(parts.values())


def _shared(part: Sequence[Node], groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Which of a replica's groups lie on the same ranks, by their numbers in it."""
    held: dict[int, list[int]] = {}
    for i, (stage, g) in enumerate(part):
        for rank in groups[stage][g]:
            held.setdefault(rank, []).append(i)
    return tuple(sorted({tuple(lanes) for lanes in held.values()}))
