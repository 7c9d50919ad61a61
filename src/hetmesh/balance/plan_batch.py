"""The one way from samples to a BatchPlan, for training, simulation, explanation and planning alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetmesh.balance.assign import assign
from hetmesh.balance.assignment import Assignment, check
from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.balance.from_graph import UNBALANCED, BalanceOptions, batch_loads, batch_plan_of, graph_slots, within_range
from hetmesh.balance.shares import shared_out
from hetmesh.errors import GraphError
from hetmesh.graph import MetaArrays, ModuleGraph, SampleMeta


def plan_batch(
    graph: ModuleGraph,
    samples: Sequence[SampleMeta],
    microbatch_size: int,
    balance: BalanceOptions = UNBALANCED,
    *,
    assign: Callable[..., Assignment] = assign,
) -> BatchPlan:
    """Which samples each lane and microbatch of each module handles; equal on every rank.

    Args:
        samples: the metadata of the global batch, expanded, in the order in which the loader drew it.
        microbatch_size: samples per microbatch and lane of the sink, on average; every module has as many microbatches
            as that makes, unless their number is free or `balance` says otherwise.
        assign: what runs the balancer; a search remembers what it made of equal loads.

    Raises:
        GraphError: the policy is unknown, a cap cannot be kept, or the batch cannot be planned.
    """
    if microbatch_size < 1:
        raise GraphError(f"a microbatch needs at least 1 sample per lane, got {microbatch_size}")
    samples = MetaArrays.of(samples)
    microbatches = max(-(-len(samples) // (microbatch_size * graph.sink.num_lanes)), 1)
    balance = within_range(graph, samples, balance)
    slots = graph_slots(graph, microbatches, balance, len(samples))
    alone = all(lanes * count == 1 for lanes, count in zip(slots.lanes, slots.microbatches, strict=True))
    policy = "none" if alone and not slots.capped and not slots.free else balance.policy  # nothing to choose
    loads = batch_loads(graph, samples, balance)
    found = assign(loads, slots, policy, score=balance.score)
    if balance.microbatch_shares:
        found = check(loads, slots, shared_out(graph, loads.modules, found, balance.microbatch_shares))
    return batch_plan_of(graph, samples, found)
