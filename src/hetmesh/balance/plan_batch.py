"""From sample metadata to a BatchPlan: what balancers see of a graph and a batch, and the plan of what they return."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Lengths, Slots, check
from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.co_located import lane_affinity, leaders, led_modules, share_microbatches
from hetmesh.balance.run_balancer import assign
from hetmesh.cost.flops import SampleCosts
from hetmesh.cost.work import samples_work
from hetmesh.errors import GraphError
from hetmesh.graph import MetaArrays, ModuleGraph, SampleMeta

_COSTS_BY_ROWS = SampleCosts((1, 0, 0), 2.0)
_WORK_BITS = 60  # of 63, for sums over modules
_OVERHEAD_ROWS = 256  # an H100 reads the weights of a layer in the time in which it multiplies about 295 rows by them


@dataclass(frozen=True)
class BalanceOptions:
    """How batches are balanced: what a recipe asks for, and what samples cost; `Slots` says more of each.

    Attributes:
        policy: a key of `POLICIES`.
        costs: per module; one that is missing counts rows.
        max_tokens: per module that leads, the most tokens (rows, of an encoder) of one lane and microbatch.
        microbatch_sizes: per module that leads, but the LLM, samples of one lane and microbatch, on average; one that
            is missing has as many microbatches as the LLM.
        microbatch_shares: per module that leads, but the LLM, and lies on the ranks of the LLM's lanes: of how many
            microbatches each of its lanes there takes how many, whole and by itself (`shares.py`). One that is missing
            has all lanes take part in each.
        free: whether the number of microbatches may be another one than the batch sizes say.
        deferral: whether the LLM may take samples one microbatch late.
        split_deferred: whether what is deferred of an encoder's microbatch is one of its own (`split_deferred`).
        lengths: what steps take (`Slots`).
    """

    policy: str = "none"
    costs: Mapping[str, SampleCosts] = field(default_factory=dict)
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    microbatch_sizes: Mapping[str, int] = field(default_factory=dict)
    free: bool = False
    deferral: bool = False
    split_deferred: bool = False
    microbatch_shares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: Lengths | None = None


UNBALANCED = BalanceOptions()
"""Samples go to microbatches and lanes in the order in which they were drawn."""


def batch_loads(graph: ModuleGraph, samples: Sequence[SampleMeta], balance: BalanceOptions = UNBALANCED) -> BatchLoads:
    """The loads of `led_modules`, with those of the modules that go along, per rank of a lane. Samples are who they are
    by their place in the batch. See `within_range` for very long ones."""
    own, led_by, metas = led_modules(graph), leaders(graph), MetaArrays.of(samples)
    work = np.zeros((len(samples), len(own)), np.int64)
    tokens = np.zeros_like(work)
    for name in graph.order:
        at = own.index(led_by[name])
        each = _costs_of(balance, name).work(graph, name, metas)
        work[:, at] += -(-each // _sharing(graph, name))
        if name == led_by[name]:
            tokens[:, at] = metas.tokens if name == graph.llm.name else metas.rows_of(name)
    padding = (0, 0)
    if not graph.llm.packed:
        row, pair, _ = (-(-n // _sharing(graph, graph.llm.name)) for n in _costs_of(balance, graph.llm.name).forward)
        padding = (row, pair)
    return BatchLoads(own, work, tokens, ids=metas.ids, padding=padding)


def within_range(graph: ModuleGraph, samples: Sequence[SampleMeta], balance: BalanceOptions) -> BalanceOptions:
    """`balance`, with costs in a coarser unit where the work of these samples would not fit into 64 bits: some samples
    of a million tokens do not. `batch_loads` and `graph_slots` must be given the same."""
    metas = MetaArrays.of(samples)
    largest = 0.0
    for name in graph.order:
        each = samples_work(graph, name, metas).astype(np.float64) @ np.array(_costs_of(balance, name).forward, float)
        largest += float(each.max(initial=0.0))
    whole = largest * max(len(metas), 1)  # all as large as the largest: what they may be padded to
    if whole < 2.0**_WORK_BITS:
        return balance
    shift = math.ceil(math.log2(whole)) - _WORK_BITS
    coarse = {}
    for name in graph.order:
        costs = _costs_of(balance, name)
        row, pair, target = (-(-n >> shift) for n in costs.forward)
        overhead = None if costs.overhead is None else costs.overhead >> shift
        coarse[name] = replace(costs, forward=(row, pair, target), overhead=overhead)
    return replace(balance, costs=coarse)


def _costs_of(balance: BalanceOptions, name: str) -> SampleCosts:
    return balance.costs.get(name, _COSTS_BY_ROWS)


def graph_slots(graph: ModuleGraph, microbatches: int, balance: BalanceOptions = UNBALANCED, samples: int = 0) -> Slots:
    """What a step of `graph` has to fill.

    Args:
        microbatches: of the LLM, and of every module without a microbatch size of its own.
        samples: of the step; those sizes give numbers of microbatches with it.

    Raises:
        GraphError: a cap or a size is not of a module that leads.
    """
    own = led_modules(graph)
    before = tuple(name for name in own[:-1] if name not in graph.topology.after_llm)
    names: tuple[tuple[str, Mapping[str, object], tuple[str, ...]], ...] = (
        ("max_tokens", balance.max_tokens, own),
        ("microbatch_sizes", balance.microbatch_sizes, before),
        ("microbatch_shares", balance.microbatch_shares, before),
    )
    for key, given, valid in names:
        if wrong := sorted(set(given) - set(valid)):
            raise GraphError(f"balance: {key} names {wrong}; the modules that are balanced are {list(valid)}")
    sizes = {name: size * graph[name].num_lanes for name, size in balance.microbatch_sizes.items()}
    return Slots(
        tuple(graph[name].num_lanes for name in own),
        tuple(max(-(-samples // sizes[name]), 1) if name in sizes else microbatches for name in own),
        max_tokens=tuple(balance.max_tokens.get(name) for name in own),
        stages=tuple(graph[name].num_stages for name in own),
        overhead=tuple(_overhead(graph, balance, name) for name in own),
        backward=tuple(_costs_of(balance, name).backward * graph.backward_reaches(name) for name in own),
        free=balance.free,
        deferral=balance.deferral,
        lockstep=graph.llm.lanes_together > 1,
        affinity=tuple(None if name == own[-1] else lane_affinity(graph[name], graph.llm) for name in own),
        lengths=balance.lengths,
    )


def _overhead(graph: ModuleGraph, balance: BalanceOptions, name: str) -> int:
    costs = _costs_of(balance, name)
    if costs.overhead is None:
        return _OVERHEAD_ROWS * costs.forward[0] // _sharing(graph, name)
    led = [each for each, leader in leaders(graph).items() if leader == name]
    return sum((_costs_of(balance, each).overhead or 0) // _sharing(graph, each) for each in led)


def _sharing(graph: ModuleGraph, name: str) -> int:
    """Ranks that share the work of a lane of one stage."""
    return graph[name].mesh.axis_size("tp") * graph[name].mesh.axis_size("cp")


def batch_plan_of(graph: ModuleGraph, samples: Sequence[SampleMeta], assignment: Assignment) -> BatchPlan:
    """The BatchPlan of an assignment whose modules are `led_modules`.

    Inside a lane of the LLM, samples lie in the order of the encoder lanes that they come from: where the ranks of a
    lane share its tokens in runs, most rows then stay on the rank that made them.
    """
    own, led_by = led_modules(graph), leaders(graph)
    lanes: dict[str, tuple[Lanes, ...]] = {}
    for i, name in enumerate(own):
        count, width = assignment.microbatches[i], assignment.lanes[i]
        bins = assignment.microbatch[:, i] * width + assignment.lane[:, i]
        from_lane = assignment.lane[:, 0] if name == graph.llm.name else np.zeros_like(bins)
        order = np.lexsort((np.arange(len(bins)), from_lane, bins))
        cuts = np.searchsorted(bins[order], np.arange(count * width + 1)).tolist()
        places = order.tolist()
        runs = [tuple(places[a:b]) for a, b in itertools.pairwise(cuts)]
        lanes[name] = tuple(tuple(runs[m * width : (m + 1) * width]) for m in range(count))
    return BatchPlan(graph, samples, {name: lanes[led_by[name]] for name in graph.order})


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
        microbatch_size: samples per microbatch and lane of the LLM, on average; every module has as many microbatches
            as that makes, unless their number is free or `balance` says otherwise.
        assign: what runs the balancer; a search remembers what it made of equal loads.

    Raises:
        GraphError: the policy is unknown, a cap cannot be kept, or the batch cannot be planned.
    """
    if microbatch_size < 1:
        raise GraphError(f"a microbatch needs at least 1 sample per lane, got {microbatch_size}")
    samples = MetaArrays.of(samples)
    microbatches = max(-(-len(samples) // (microbatch_size * graph.llm.num_lanes)), 1)
    balance = within_range(graph, samples, balance)
    slots = graph_slots(graph, microbatches, balance, len(samples))
    alone = all(lanes * count == 1 for lanes, count in zip(slots.lanes, slots.microbatches, strict=True))
    policy = "none" if alone and not slots.capped and not slots.free else balance.policy  # nothing to choose
    loads = batch_loads(graph, samples, balance)
    found = assign(loads, slots, policy)
    if balance.microbatch_shares:
        found = check(loads, slots, share_microbatches(graph, loads.modules, found, balance.microbatch_shares))
    if balance.split_deferred:
        found = split_deferred(found)
    if after := [i for i, name in enumerate(loads.modules) if name in graph.topology.after_llm]:
        found = check(loads, slots, _with_llm(found, after))
    return batch_plan_of(graph, samples, found)


def _with_llm(assignment: Assignment, after: Sequence[int]) -> Assignment:
    """`assignment`, where the modules `after` the LLM, the last, handle samples in its microbatches."""
    counts, microbatch = list(assignment.microbatches), assignment.microbatch.copy()
    for i in after:
        counts[i], microbatch[:, i] = counts[-1], microbatch[:, -1]
    return replace(assignment, microbatches=tuple(counts), microbatch=microbatch)


def split_deferred(assignment: Assignment) -> Assignment:
    """`assignment`, where every microbatch of the modules before the last becomes two, what the last module takes in
    its turn and what it takes one later: each is a graph of autograd with a backward of its own, as soon as its
    gradients are there (Entrain's split backward). Where nothing is deferred, it stays as it is."""
    if not assignment.deferred.any():
        return assignment
    microbatch = assignment.microbatch.copy()
    microbatch[:, :-1] = 2 * microbatch[:, :-1] + assignment.deferred[:, None]
    counts = (*(2 * count for count in assignment.microbatches[:-1]), assignment.microbatches[-1])
    return replace(assignment, microbatches=counts, microbatch=microbatch)


def largest_batches(graph: ModuleGraph, samples: MetaArrays, size: int) -> list[MetaArrays]:
    """Global batches of `size` samples, each of those that give one module most rows, or the LLM most targets: what is
    kept grows with these. A batch of only such samples is a bound for all that can be drawn from `samples`: chance
    rarely puts them together. Of equal samples the earlier ones count, so that it is deterministic; fewer samples than
    `size` come again from the largest on.

    Args:
        samples: expanded metadata, at least one.
    """
    found: dict[tuple[int, ...], None] = {}
    for name in graph.order:
        for measure in samples_work(graph, name, samples).T[[0, 2]]:
            if measure.any():
                order = np.argsort(-measure, kind="stable")[:size]
                found[tuple(np.resize(order, size).tolist())] = None
    return [samples.take(chosen) for chosen in found]
