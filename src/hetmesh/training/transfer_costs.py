"""What the transfers of a step cost: the bytes of their plans over a machine's links."""

from __future__ import annotations

import math

from hetmesh.balance import BatchPlan, edge_layouts
from hetmesh.cost import Machine, TransferCost
from hetmesh.cost.collectives import link
from hetmesh.graph import Edge
from hetmesh.layout import TransferPlan, plan_transfer
from hetmesh.schedule import Schedule

_SAMPLED = 32  # destination ranks whose bytes are counted; more are sampled evenly (lanes repeat along a mesh)


def transfer_costs(plan: BatchPlan, schedule: Schedule, machine: Machine) -> dict[tuple[Edge, int], TransferCost]:
    """Per edge, forward and where a gradient flows reversed, and microbatch: the bytes of the rank that receives most,
    over the slowest link into it."""
    costs = {}
    per_node = machine.ranks_per_node or None
    for edge in schedule.stages.edges:
        itemsize = plan.graph[edge.source.module].options.row_dtype.itemsize
        for m in range(schedule.microbatches):
            shape, src, dst = edge_layouts(plan, edge, m)
            forward = plan_transfer(shape, src, dst, ranks_per_node=per_node)
            costs[edge, m] = _transfer(forward, itemsize, machine)
            if schedule.training and edge in schedule.stages.gradient_edges:
                costs[edge.reversed, m] = _transfer(forward.transpose(), itemsize, machine)
    return costs


def _transfer(plan: TransferPlan, itemsize: int, machine: Machine) -> TransferCost:
    ranks = plan.dst.mesh.ranks
    step = math.ceil(len(ranks) / _SAMPLED)
    received = {rank: plan.bytes_received(rank, itemsize) for rank in ranks[::step]}
    rank = max(received, key=lambda r: received[r])
    if not received[rank]:
        return TransferCost()
    senders = {p.src for each in plan.steps for p in each.received(rank) if p.src != rank}
    slowest = max((link(machine, (s, rank)) for s in senders), key=lambda joined: joined.seconds(received[rank]))
    return TransferCost(slowest.seconds(received[rank]), received[rank])
