"""The one way from samples to a BatchPlan, for training, simulation, explanation and planning alike."""

from __future__ import annotations

from collections.abc import Sequence

from hetmesh.balance.assign import assign
from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.balance.from_graph import DEFAULT, BalanceOptions, SampleWork, batch_loads, batch_plan_of, graph_slots
from hetmesh.balance.pipeline import Score
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, SampleMeta


def plan_batch(
    graph: ModuleGraph,
    samples: Sequence[SampleMeta],
    microbatch_size: int,
    policy: str = "none",
    *,
    options: BalanceOptions = DEFAULT,
    work: SampleWork | None = None,
    score: Score | None = None,
) -> BatchPlan:
    """Which samples each lane and microbatch of each module handles; equal on every rank.

    Args:
        samples: the metadata of the global batch, expanded, in the order in which the loader drew it.
        microbatch_size: samples per microbatch and lane of the sink, on average; every module has as many microbatches
            as that makes, the last of which may be smaller.
        policy: a key of `POLICIES`.
        options: what the recipe asks for beside.
        work: what a sample costs a module (`batch_loads`).
        score: what `auto` chooses by (`assign`).

    Raises:
        GraphError: the policy is unknown, or the batch cannot be planned.
    """
    if microbatch_size < 1:
        raise GraphError(f"a microbatch needs at least 1 sample per lane, got {microbatch_size}")
    microbatches = max(-(-len(samples) // (microbatch_size * graph.sink.num_lanes)), 1)
    loads, slots = batch_loads(graph, samples, work), graph_slots(graph, microbatches, options)
    return batch_plan_of(graph, samples, assign(loads, slots, policy, score=score))
