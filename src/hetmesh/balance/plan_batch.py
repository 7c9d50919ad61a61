"""The one way from samples to a BatchPlan, for training, simulation, explanation and planning alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetmesh.balance.assign import assign
from hetmesh.balance.assignment import Assignment
from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.in_order import in_order
from hetmesh.balance.leaders import lane_affinity, leaders
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.pipeline import Score
from hetmesh.balance.policies import POLICIES
from hetmesh.cost.sample_costs import SampleCosts
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, SampleMeta

_UNKNOWN = SampleCosts((1, 0, 0), 2.0)


@dataclass(frozen=True)
class Balance:
    """How batches are balanced; `[balance]` of a recipe, with what samples cost.

    Attributes:
        policy: a key of `POLICIES`.
        costs: per module; those that are missing count rows.
        max_tokens: per module, the most tokens (rows of an encoder) of one lane in one microbatch.
        free: whether the number of microbatches may differ from the recipe's where that is faster.
        deferral: whether the LLM may take samples one microbatch later than the encoders.
        score: what `auto` chooses by; None: the length of a 1F1B pipeline's step.
    """

    policy: str = "none"
    costs: Mapping[str, SampleCosts] = field(default_factory=dict)
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    free: bool = False
    deferral: bool = False
    score: Score | None = None


IN_ORDER = Balance()
"""Nothing is balanced: samples go to lanes and microbatches in the order in which they were drawn."""


def plan_batch(
    graph: ModuleGraph, samples: Sequence[SampleMeta], microbatch_size: int, balance: Balance = IN_ORDER
) -> BatchPlan:
    """Which samples each lane and microbatch of each module handles; equal on every rank.

    Args:
        samples: the metadata of the global batch, expanded, in the order in which the loader drew it.
        microbatch_size: samples per microbatch and lane of the sink, in the mean.

    Raises:
        GraphError: the policy is unknown, a cap cannot be kept, or the batch cannot be planned.
    """
    if balance.policy not in POLICIES:
        raise GraphError(f"balance policy {balance.policy!r}: valid are {sorted(POLICIES)}")
    if balance.policy == "none" and not balance.max_tokens:
        return in_order(graph, samples, microbatch_size)
    if microbatch_size < 1:
        raise GraphError(f"a microbatch needs at least 1 sample per lane, got {microbatch_size}")
    led_by = leaders(graph)
    own = [name for name in graph.order if led_by[name] == name]
    slots = batch_slots(graph, led_by, len(samples), microbatch_size, balance)
    if (
        not balance.max_tokens
        and not slots.free
        and all(lanes * count == 1 for lanes, count in zip(slots.lanes, slots.microbatches, strict=True))
    ):
        return in_order(graph, samples, microbatch_size)
    loads = batch_loads(graph, led_by, samples, balance)
    assignment = assign(loads, slots, balance.policy, score=balance.score)
    lanes = {name: _lanes(assignment, i) for i, name in enumerate(own)}
    return BatchPlan(graph, tuple(samples), {name: lanes[led_by[name]] for name in graph.order})


def batch_slots(
    graph: ModuleGraph, led_by: Mapping[str, str], samples: int, microbatch_size: int, balance: Balance
) -> Slots:
    """What there is to fill, for the modules that lead; the sink is the last of them."""
    own = [name for name in graph.order if led_by[name] == name]
    sink = graph.sink
    count = max(math.ceil(samples / (microbatch_size * sink.num_lanes)), 1)
    return Slots(
        lanes=tuple(graph[name].num_lanes for name in own),
        microbatches=(count,) * len(own),
        max_tokens=tuple(balance.max_tokens.get(name) for name in own),
        stages=tuple(graph[name].num_stages for name in own),
        backward=tuple(balance.costs.get(name, _UNKNOWN).backward for name in own),
        free=balance.free,
        deferral=balance.deferral,
        lockstep=any(module.mesh.axis_size("dp_shard") > 1 for module in graph.modules),
        affinity=tuple(None if name == sink.name else lane_affinity(graph[name], sink) for name in own),
    )


def batch_loads(
    graph: ModuleGraph, led_by: Mapping[str, str], samples: Sequence[SampleMeta], balance: Balance
) -> BatchLoads:
    """The work of every sample for every module that leads, with that of those that go along, per rank of a lane."""
    own = [name for name in graph.order if led_by[name] == name]
    work = np.zeros((len(samples), len(own)), np.int64)
    tokens = np.zeros_like(work)
    for name in graph.order:
        at, mesh = own.index(led_by[name]), graph[name].mesh
        sharing = mesh.axis_size("tp") * mesh.axis_size("cp")
        work[:, at] += -(-balance.costs.get(name, _UNKNOWN).work(graph, name, samples) // sharing)
        if name == led_by[name]:
            tokens[:, at] = [s.tokens if name == graph.sink.name else s.rows.get(name, 0) for s in samples]
    return BatchLoads(tuple(own), work, tokens, ids=[sample.id for sample in samples])


def _lanes(assignment: Assignment, module: int) -> tuple[Lanes, ...]:
    """The samples of each microbatch and lane, by ascending place in the batch."""
    lanes, count = assignment.lanes[module], assignment.microbatches[module]
    bins = assignment.microbatch[:, module] * lanes + assignment.lane[:, module]
    order = np.argsort(bins, kind="stable")
    edges = np.searchsorted(bins[order], np.arange(lanes * count + 1)).tolist()
    members = order.tolist()
    cells = [tuple(members[a:b]) for a, b in itertools.pairwise(edges)]
    return tuple(tuple(cells[m * lanes : (m + 1) * lanes]) for m in range(count))
