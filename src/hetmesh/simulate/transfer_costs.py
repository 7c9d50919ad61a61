"""What the transfers of a step cost: the bytes that ranks lack, over a machine's links. Nothing is planned for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetmesh.balance import BatchPlan, edge_layouts
from hetmesh.cost import Machine, TransferCost
from hetmesh.cost.collectives import Link
from hetmesh.graph import Edge
from hetmesh.layout import Layout
from hetmesh.layout.intervals import extent
from hetmesh.schedule import Schedule
from hetmesh.simulate.rank_work import overlap


def transfer_costs(
    plan: BatchPlan, schedule: Schedule, machine: Machine, sample: int
) -> dict[tuple[Edge, int], TransferCost]:
    """Per edge, forward and where a gradient flows reversed, and microbatch: the bytes of the rank that receives most,
    and the seconds of the rank that receives or sends most, over the slowest link into the former.

    Args:
        sample: ranks, and microbatches, that are looked at. Where there are more they are taken evenly: lanes repeat
            along a mesh, and a microbatch between takes the bytes of the one before, by tokens.
    """
    costs: dict[tuple[Edge, int], TransferCost] = {}
    count = schedule.microbatches
    step = math.ceil(count / sample)
    sizes = [_tokens(plan, m) for m in range(count)]
    for edge in schedule.stages.edges:
        itemsize = plan.graph[edge.source.module].options.row_dtype.itemsize
        back = schedule.training and edge in schedule.stages.gradient_edges
        for first in range(0, count, step):
            shape, src, dst = edge_layouts(plan, edge, first)
            ways = [(edge, src, dst)] + ([(edge.reversed, dst, src)] if back else [])
            for each, held, kept in ways:
                received, sent, link = _busiest(shape, held, kept, machine, sample)
                for m in range(first, min(first + step, count)):
                    scale = itemsize * sizes[m] / sizes[first]
                    seconds = link.seconds(round(max(received, sent) * scale))
                    costs[each, m] = TransferCost(seconds, round(received * scale))
    return costs


def _tokens(plan: BatchPlan, microbatch: int) -> int:
    lanes = plan.lanes[plan.graph.sink.name][microbatch]
    return max(1, sum(plan.samples[i].tokens for lane in lanes for i in lane))


def _busiest(
    shape: tuple[int, int], src: Layout, dst: Layout, machine: Machine, sample: int
) -> tuple[int, float, Link]:
    """Elements that the rank receives which receives most, elements that the rank sends which sends most, and the
    slowest link over which the former come. Every element that a rank keeps and does not hold comes to it once, from
    its own node where a rank there holds it."""
    ranks = _sample(dst, sample)
    received = {rank: _lacking(shape, src, dst, rank) for rank in ranks}
    rank = max(received, key=lambda r: received[r])
    # Each sends as large a part of all as it holds: one rank in front of four replicas sends four times what each gets.
    held = [math.prod(extent(rows) for rows in src.intervals(shape, r)) for r in _sample(src, sample)]
    total = sum(received.values()) / len(ranks) * dst.mesh.size
    mean = sum(held) / len(held)
    sent = total / src.mesh.size * max(held) / mean if mean else 0.0
    near = not received[rank] or _on_node(shape, src, dst, rank, machine.ranks_per_node)
    if near:
        return received[rank], sent, Link(machine.node_bandwidth, machine.node_latency)
    return received[rank], sent, Link(machine.network_bandwidth, machine.network_latency)


def _sample(layout: Layout, sample: int) -> tuple[int, ...]:
    ranks = layout.mesh.ranks
    return ranks[:: math.ceil(len(ranks) / sample)]


def _lacking(shape: tuple[int, int], src: Layout, dst: Layout, rank: int) -> int:
    kept = [sorted(rows) for rows in dst.intervals(shape, rank)]
    whole = math.prod(sum(b - a for a, b in rows) for rows in kept)
    if rank not in src.mesh:
        return whole
    held = [sorted(rows) for rows in src.intervals(shape, rank)]
    return whole - math.prod(overlap(tuple(a), tuple(b)) for a, b in zip(kept, held, strict=True))


def _on_node(shape: tuple[int, int], src: Layout, dst: Layout, rank: int, per_node: int) -> bool:
    """Whether ranks on the node of `rank` hold all rows that it keeps."""
    if not per_node:
        return True
    start = rank // per_node * per_node
    near: Sequence[int] = [r for r in range(start, start + per_node) if r in src.mesh]
    kept = tuple(sorted(dst.intervals(shape, rank)[0]))
    shares = {tuple(sorted(src.intervals(shape, r)[0])) for r in near}  # replicas hold equal rows
    return sum(overlap(kept, rows) for rows in shares) >= sum(b - a for a, b in kept)
