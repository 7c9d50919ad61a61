"""What the transfers of a step cost: the bytes that ranks lack, over a machine's links. Nothing is planned for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from hetmesh.balance import BatchPlan, edge_layouts
from hetmesh.cost import Machine, TransferCost
from hetmesh.cost.collective_time import Link
from hetmesh.graph import Edge, Route
from hetmesh.layout import Layout
from hetmesh.layout.intervals import Intervals, extent, overlap
from hetmesh.layout.transfer import lacking_elements
from hetmesh.schedule import Schedule

Ways = dict[tuple, list[tuple[bool, int, float, bool]]]
"""What is known of routes, whatever the machine's links: per way, whether it is reversed, the elements received and
sent of the rank with most, and whether they come from its own node."""


def transfer_costs(
    plan: BatchPlan, schedule: Schedule, machine: Machine, sample: int, known: Ways | None = None
) -> dict[Route, TransferCost]:
    """Per route, forward and where a gradient flows reversed: the bytes of the rank that receives most, and the seconds
    of the rank that receives or sends most, over the slowest link into the former.

    Args:
        sample: ranks, and routes of an edge, that are looked at. Where there are more they are taken evenly: lanes
            repeat along a mesh, and a route between takes the bytes of the one before, by tokens.
        known: of this plan and schedule from another machine of as many ranks per node; filled on the way.
    """
    costs: dict[Route, TransferCost] = {}
    known = {} if known is None else known
    links = {
        True: Link(machine.node_bandwidth, machine.node_latency),
        False: Link(machine.network_bandwidth, machine.network_latency),
    }
    for edge in schedule.stages.edges:
        itemsize = plan.graph[edge.source.module].options.row_dtype.itemsize
        back = schedule.training and edge in schedule.stages.gradient_edges
        routes = list(schedule.routes.along(edge))
        sizes = route_tokens(plan, edge)
        step = max(math.ceil(len(routes) / sample), 1)
        for start in range(0, len(routes), step):
            first = routes[start]
            key = _alike(plan, edge, first, back) or (edge, first, back)
            ways = known.get(key)
            if ways is None:
                shape, src, dst = edge_layouts(plan, edge, first.source, first.destination)
                both = [(False, src, dst)] + ([(True, dst, src)] if back else [])
                ways = [(reverse, *_busiest(shape, held, kept, machine, sample)) for reverse, held, kept in both]
                known[key] = ways
            for reverse, received, sent, near in ways:
                for route in routes[start : start + step]:
                    scale = itemsize * sizes.get(route[1:], 1) / sizes.get(first[1:], 1)
                    seconds = links[near].seconds(round(max(received, sent) * scale))
                    cost = TransferCost(seconds, round(received * scale))
                    costs[route.reversed if reverse else route] = cost
    return costs


def _alike(plan: BatchPlan, edge: Edge, route: Route, back: bool) -> tuple | None:
    """What edges within a module have in common whose layouts are the same: stages take turns on the pipeline ranks."""
    if not edge.internal:
        return None
    pp = plan.graph[edge.source.module].mesh.axis_size("pp")
    ends = edge.source.index % pp, edge.destination.index % pp
    return edge.source.module, *ends, route.source, back


def route_tokens(plan: BatchPlan, edge: Edge) -> dict[tuple[int, int], int]:
    """Tokens of the samples of every route of an edge with any, by microbatches of its source and its destination."""
    tokens = [sample.tokens for sample in plan.samples]
    ends = (plan.microbatch_of(module).tolist() for module in (edge.source.module, edge.destination.module))
    sizes: dict[tuple[int, int], int] = {}
    for count, *route in zip(tokens, *ends, strict=True):
        key = (route[0], route[1])
        sizes[key] = sizes.get(key, 0) + count
    return {route: max(count, 1) for route, count in sizes.items()}


def _busiest(
    shape: tuple[int, int], src: Layout, dst: Layout, machine: Machine, sample: int
) -> tuple[int, float, bool]:
    """Elements that the rank receives which receives most, elements that the rank sends which sends most, and whether
    all of the former come from its node. Every element that a rank keeps and does not hold comes to it once, from
    its own node where a rank there holds it."""
    ranks = _sample(dst, sample)
    received = {rank: lacking_elements(shape, src, dst, rank) for rank in ranks}
    rank = max(received, key=lambda r: received[r])
    # Each sends as large a part of all as it holds: one rank in front of four replicas sends four times what each gets.
    held = [math.prod(map(extent, _intervals(src, shape, r))) for r in _sample(src, sample)]
    total = sum(received.values()) / len(ranks) * dst.mesh.size
    mean = sum(held) / len(held)
    sent = total / src.mesh.size * max(held) / mean if mean else 0.0
    return received[rank], sent, not received[rank] or _on_node(shape, src, dst, rank, machine.ranks_per_node)


def _sample(layout: Layout, sample: int) -> tuple[int, ...]:
    ranks = layout.mesh.ranks
    return ranks[:: math.ceil(len(ranks) / sample)]


@lru_cache(maxsize=4096)  # a route is looked at once each way, and both ways at senders and receivers
def _intervals(layout: Layout, shape: tuple[int, int], rank: int) -> tuple[Intervals, ...]:
    return tuple(tuple(sorted(rows)) for rows in layout.intervals(shape, rank))


def _on_node(shape: tuple[int, int], src: Layout, dst: Layout, rank: int, per_node: int) -> bool:
    """Whether ranks on the node of `rank` hold all rows that it keeps."""
    if not per_node:
        return True
    start = rank // per_node * per_node
    near: Sequence[int] = [r for r in range(start, start + per_node) if r in src.mesh]
    kept = _intervals(dst, shape, rank)[0]
    shares = {_intervals(src, shape, r)[0] for r in near}  # replicas hold equal rows
    return sum(overlap(kept, rows) for rows in shares) >= sum(b - a for a, b in kept)
