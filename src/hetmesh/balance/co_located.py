"""Modules on the same ranks: which are balanced together, and encoder lanes that take whole microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, ModuleSpec


@lru_cache(maxsize=32)
def leaders(graph: ModuleGraph) -> Mapping[str, str]:
    """Per module the one whose lanes and microbatches it takes over: itself, or the only module that it feeds, or that
    feeds it, where both have one mesh. Rows between them then stay where they are."""
    found: dict[str, str] = {}
    for name in reversed(graph.order):
        consumers = {b.destination for b in graph.boundaries if b.source == name}
        found[name] = name
        if name != graph.llm.name and len(consumers) == 1 and graph[name].mesh == graph[only := consumers.pop()].mesh:
            found[name] = found[only]
    for name in graph.order:
        producers = {b.source for b in graph.inputs(name)}
        if found[name] == name and name != graph.llm.name and len(producers) == 1:
            only = producers.pop()
            if graph[name].mesh == graph[only].mesh:
                found |= {follower: found[only] for follower, leader in found.items() if leader == name}
    # of a group the encoder leads, unless the LLM is in it, or a module after that, which has the LLM's microbatches
    first: dict[str, str] = {graph.llm.name: graph.llm.name}
    for name in sorted(graph.order, key=lambda name: name not in graph.topology.after_llm):
        first.setdefault(found[name], name)
    return MappingProxyType({name: first[found[name]] for name in graph.order})


def led_modules(graph: ModuleGraph) -> tuple[str, ...]:
    """The modules that are balanced; the others go along with one of them. The LLM is the last, whatever follows it."""
    led_by = leaders(graph)
    own = [name for name in graph.order if led_by[name] == name and name != graph.llm.name]
    return (*own, graph.llm.name)


@lru_cache(maxsize=256)
def lane_affinity(module: ModuleSpec, llm: ModuleSpec) -> np.ndarray | None:
    """How many ranks each lane of a module shares with each lane of the LLM, int64 `[lanes, lanes of the LLM]`; None
    where they share none."""
    own, other = lane_ranks(module), lane_ranks(llm)
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


def pipelines(graph: ModuleGraph, name: str) -> tuple[tuple[int, ...], ...]:
    """Per lane of the LLM the lanes of a module on its ranks, ascending: Optimus' encoder pipelines.
    Raises GraphError: they are not equally many, or a lane of the module lies on ranks of several lanes, or of none."""
    shared = lane_affinity(graph[name], graph.llm)
    count, lanes = graph.llm.num_lanes, graph[name].num_lanes
    if shared is not None and ((shared > 0).sum(1) == 1).all():
        own = shared.argmax(1)
        found = tuple(tuple(np.flatnonzero(own == lane).tolist()) for lane in range(count))
        if all(len(lanes_of_pipeline) * count == lanes for lanes_of_pipeline in found):
            return found
    raise GraphError(
        f"{name!r} has {lanes} lanes and {graph.llm.name!r} has {count}: each of the latter needs equally many of the "
        "former, which lie on its ranks and on no other's"
    )


@lru_cache(maxsize=256)
def deal_microbatches(microbatches: int, shares: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which pipeline takes each microbatch, and as which of its own microbatches: pipelines, and numbers, which rise.

    Pipelines take turns: each has had its share at any time, as nearly as whole numbers allow (numbers of microbatches
    by largest remainders, where they are not `shares` themselves). Runs of microbatches of different pipelines have one
    number, so that pipelines work side by side and what feeds neighbours is one microbatch.
    """
    total = sum(shares)
    counts = [microbatches * share // total for share in shares]
    left = sorted(range(len(shares)), key=lambda j: (-(microbatches * shares[j] % total), j))
    for j in left[: microbatches - sum(counts)]:
        counts[j] += 1
    turns = sorted(((2 * k + 1) / (2 * counts[j]), j) for j in range(len(shares)) for k in range(counts[j]))
    numbers: list[int] = []
    run: set[int] = set()
    for _, j in turns:
        if j in run or not numbers:
            run = set()
            numbers.append(numbers[-1] + 1 if numbers else 0)
        else:
            numbers.append(numbers[-1])
        run.add(j)
    return tuple(j for _, j in turns), tuple(numbers)


def share_microbatches(
    graph: ModuleGraph, own: Sequence[str], assignment: Assignment, shares: Mapping[str, Sequence[int]]
) -> Assignment:
    """`assignment`, where the samples of a microbatch of an encoder that one lane of the LLM has all go to one lane of
    the encoder on its ranks.

    Args:
        own: its modules, the LLM the last.
        shares: per module of how many microbatches each pipeline takes how many.

    Raises:
        GraphError: a module's lanes are no pipelines of the LLM's lanes, or not as many as it has shares.
    """
    counts, microbatch, lane = list(assignment.microbatches), assignment.microbatch.copy(), assignment.lane.copy()
    for name, given in shares.items():
        groups, i = check_shares(graph, name, given), own.index(name)
        taken, number = map(np.array, deal_microbatches(counts[i], tuple(given)))
        before = microbatch[:, i].copy()
        lane[:, i] = np.array(groups)[lane[:, -1], taken[before]]
        microbatch[:, i] = number[before]
        counts[i] = int(number[-1]) + 1
    return replace(assignment, microbatches=tuple(counts), microbatch=microbatch, lane=lane)


def check_shares(graph: ModuleGraph, name: str, shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`pipelines`, if there is a share of at least 1 for each; raises GraphError as `share_microbatches`."""
    groups = pipelines(graph, name)
    if len(shares) != len(groups[0]):
        raise GraphError(
            f"{len(shares)} shares, but {len(groups[0])} lanes of {name!r} lie on the ranks of each lane of "
            f"{graph.llm.name!r}"
        )
    if any(share < 1 for share in shares):
        raise GraphError(f"shares {list(shares)}: each must be at least 1")
    return groups
