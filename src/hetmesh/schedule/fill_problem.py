"""What `bubble_fill` puts together, as tables of integers: the LLM's actions in order, and what fills its gaps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.held import readers
from hetmesh.schedule.one_by_one import one_by_one
from hetmesh.schedule.order import Durations, compute_dependencies
from hetmesh.schedule.schedule import Action, Kind, backward_kinds

Together = Callable[[Stage], Collection[Collection[int]]]
"""Sets of a stage's ranks: those of one set start an action together, because collectives join them."""

Groups = tuple[tuple[int, ...], ...]
"""Sets of tracks that start an action together."""


@dataclass(frozen=True, eq=False)
class FillProblem:
    """Compute actions by number: first those of the sink's module in their order, then all others, the *fillers*:
    forwards, then backwards, each in the order of `one_by_one`.

    A track is all ranks that hold the same stages, and so do the same.

    Attributes:
        actions: by number.
        fixed: how many belong to the sink's module.
        backwards: the number of the first backward of a filler.
        seconds: of each.
        groups: of each, the tracks that take part, by sets that start together.
        before: of each, the numbers of actions that it needs, and whether it needs them set by set alone.
        previous: of each, what comes right before it in the order of its tracks (of fillers, of its stage).
        sequences: per track, the sink's actions in order.
        stage: of each, the number of its stage.
        ends: of each forward of a filler, the actions after which its stage no longer holds the microbatch.
        stages: by number.
    """

    actions: tuple[Action, ...]
    fixed: int
    backwards: int
    seconds: tuple[float, ...]
    groups: tuple[Groups, ...]
    before: tuple[tuple[tuple[int, bool], ...], ...]
    previous: tuple[tuple[int, ...], ...]
    sequences: tuple[tuple[int, ...], ...]
    stage: tuple[int, ...]
    ends: Mapping[int, tuple[int, ...]]
    stages: tuple[Stage, ...]

    def timed(self, seconds: Sequence[float]) -> FillProblem:
        """The same with other seconds."""
        return replace(self, seconds=tuple(seconds))


def fill_problem(
    stages: StageGraph,
    routes: Routes,
    training: bool,
    order: Sequence[Action],
    durations: Durations,
    split: frozenset[Stage] = frozenset(),
    together: Together | None = None,
) -> FillProblem:
    """The tables.

    Args:
        order: the compute actions of the sink's module.
        split: stages of the sink's module whose backward has two parts.
        together: None: all ranks of a stage start together.
    """
    sink = stages.sink.module
    others = [a for step in one_by_one(stages, routes, training) for a in step if _stage(a).module != sink]
    fillers = [a for a in others if a.kind is Kind.FORWARD], [a for a in others if a.kind is not Kind.FORWARD]
    actions = (*order, *fillers[0], *fillers[1])
    number = {action: i for i, action in enumerate(actions)}
    groups, count = _groups(stages, together)
    index = {stage: i for i, stage in enumerate(stages.stages)}
    sequences: list[list[int]] = [[] for _ in range(count)]
    previous: list[tuple[int, ...]] = []
    last: dict[tuple[Stage, bool], int] = {}
    for i, action in enumerate(actions):
        stage, forward = _stage(action), action.kind is Kind.FORWARD
        if i < len(order):
            tracks = list(itertools.chain.from_iterable(groups[stage]))
            previous.append(tuple(dict.fromkeys(sequences[t][-1] for t in tracks if sequences[t])))
            for track in tracks:
                sequences[track].append(i)
        else:
            previous.append((last[stage, forward],) if (stage, forward) in last else ())
            last[stage, forward] = i
    before = []
    for action in actions:
        needed = dict.fromkeys(compute_dependencies(action, stages, routes, split))
        before.append(tuple((number[a], _alike(groups, action, a)) for a in needed))
    ends: dict[int, tuple[int, ...]] = {}
    for i in range(len(order), len(order) + len(fillers[0])):
        stage, m = _stage(actions[i]), actions[i].microbatch
        kinds = backward_kinds(stage, stages, split) if training else ()
        if kinds:
            ends[i] = (number[Action(kinds[-1], stage, m)],)
        else:
            ends[i] = tuple(number[Action(Kind.FORWARD, *each)] for each in readers(stage, m, stages, routes))
    return FillProblem(
        actions,
        len(order),
        len(order) + len(fillers[0]),
        tuple(map(durations, actions)),
        tuple(groups[_stage(action)] for action in actions),
        tuple(before),
        tuple(previous),
        tuple(map(tuple, sequences)),
        tuple(index[_stage(action)] for action in actions),
        ends,
        stages.stages,
    )


def _alike(groups: Mapping[Stage, Groups], one: Action, other: Action) -> bool:
    """Whether a lane needs of another action no more than what the same lane does in it."""
    a, b = _stage(one), _stage(other)
    return a.module == b.module and groups[a] == groups[b]


def _groups(stages: StageGraph, together: Together | None) -> tuple[dict[Stage, Groups], int]:
    """Per stage its sets of tracks, and how many tracks there are."""
    held: dict[int, list[Stage]] = {}
    for stage, ranks in zip(stages.stages, stages.ranks, strict=True):
        for rank in ranks:
            held.setdefault(rank, []).append(stage)
    numbers: dict[tuple[Stage, ...], int] = {}
    track = {rank: numbers.setdefault(tuple(held[rank]), len(numbers)) for rank in sorted(held)}
    groups: dict[Stage, Groups] = {}
    for stage in stages.stages:
        merged: list[set[int]] = []
        for some in together(stage) if together else (stages.ranks_of(stage),):
            tracks = {track[rank] for rank in some}
            joined = tracks.union(*(each for each in merged if each & tracks))
            merged = [each for each in merged if not each & tracks] + [joined]
        groups[stage] = tuple(sorted(tuple(sorted(each)) for each in merged))
    return groups, len(numbers)


def _stage(action: Action) -> Stage:
    assert isinstance(action.target, Stage)
    return action.target
