"""What `bubble_fill` puts together, as tables of integers: the LLM's actions in order, and what fills its gaps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetmesh.cost.step_costs import Lanes
from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.list_schedule import Durations, SetDurations
from hetmesh.schedule.schedule import NO_STAGES, Action, Kind, backward_kinds, compute_dependencies, readers
from hetmesh.schedule.sequential import one_by_one

Groups = tuple[tuple[int, ...], ...]
"""Sets of tracks that start an action together."""

Needed = tuple[tuple[int, ...], ...] | None
"""Which sets of another action each set of an action waits for; None: all for all."""


@dataclass(frozen=True, eq=False)
class FillProblem:
    """Compute actions by number: first those of the LLM's module in their order, then all others, the *fillers*:
    forwards, then backwards, each in the order of `one_by_one`.

    A track is all ranks that hold the same stages, and so do the same. Sets of ranks that share a track are one.

    Attributes:
        actions: by number.
        fixed: how many belong to the LLM's module.
        backwards: the number of the first backward of a filler.
        seconds: of each, on each of its sets of tracks.
        groups: of each, the tracks that take part, by sets that start together.
        before: of each, the numbers of actions that it needs, and which sets of them.
        previous: of each, what comes right before it in the order of its tracks (of fillers, of its stage), or else
            would come too late for a cap of the LLM's module.
        sequences: per track, the LLM's actions in order.
        stage: of each, the number of its stage.
        ends: of each forward of a filler, the actions after which its stage no longer holds the microbatch.
        stages: by number.
    """

    actions: tuple[Action, ...]
    fixed: int
    backwards: int
    seconds: tuple[tuple[float, ...], ...]
    groups: tuple[Groups, ...]
    before: tuple[tuple[tuple[int, Needed], ...], ...]
    previous: tuple[tuple[int, ...], ...]
    sequences: tuple[tuple[int, ...], ...]
    stage: tuple[int, ...]
    ends: Mapping[int, tuple[int, ...]]
    stages: tuple[Stage, ...]

    def renamed(self, names: Callable[[Action], Action]) -> FillProblem:
        """The same with the seconds of the actions that are meant."""
        number = {action: i for i, action in enumerate(self.actions)}
        return replace(self, seconds=tuple(self.seconds[number[names(action)]] for action in self.actions))


def fill_problem(
    stages: StageGraph,
    routes: Routes,
    training: bool,
    order: Sequence[Action],
    durations: Durations,
    split: frozenset[Stage] = NO_STAGES,
    lanes: Lanes | None = None,
    caps: Mapping[Stage, int] | None = None,
    on_sets: SetDurations | None = None,
) -> FillProblem:
    """The tables.

    Args:
        order: the compute actions of the LLM's module.
        split: stages of the LLM's module whose backward has two parts.
        lanes: None: all ranks of a stage start together.
        caps: how many microbatches stages of the LLM's module hold at most in that order; None: no matter.
        on_sets: what actions take on each of the sets of `lanes`; None: `durations` on all.
    """
    llm = stages.llm.module
    others = [a for step in one_by_one(stages, routes, training) for a in step if a.stage.module != llm]
    fillers = [a for a in others if a.kind is Kind.FORWARD], [a for a in others if a.kind is not Kind.FORWARD]
    actions = (*order, *fillers[0], *fillers[1])
    number = {action: i for i, action in enumerate(actions)}
    groups, places, count = _groups(stages, lanes)
    index = {stage: i for i, stage in enumerate(stages.stages)}
    sequences: list[list[int]] = [[] for _ in range(count)]
    previous: list[tuple[int, ...]] = []
    last: dict[tuple[Stage, bool], int] = {}
    for i, action in enumerate(actions):
        stage, forward = action.stage, action.kind is Kind.FORWARD
        if i < len(order):
            tracks = list(itertools.chain.from_iterable(groups[stage]))
            previous.append(tuple(dict.fromkeys(sequences[t][-1] for t in tracks if sequences[t])))
            for track in tracks:
                sequences[track].append(i)
        else:
            previous.append((last[stage, forward],) if (stage, forward) in last else ())
            last[stage, forward] = i
    for i, reads in _let_go(order, stages, routes, training, caps or {}):
        previous[i] += tuple(number[read] for read in reads if number[read] not in previous[i])
    flows = _flows(stages, routes, lanes, groups, places)
    before = []
    for action in actions:
        needed = dict.fromkeys(compute_dependencies(action, stages, routes, split))
        before.append(tuple((number[other], _needed(flows, groups, action, other)) for other in needed))
    ends: dict[int, tuple[int, ...]] = {}
    for i in range(len(order), len(order) + len(fillers[0])):
        stage, m = actions[i].stage, actions[i].microbatch
        kinds = backward_kinds(stage, stages, split) if training else ()
        if kinds:
            ends[i] = (number[Action(kinds[-1], stage, m)],)
        else:
            ends[i] = tuple(number[Action(Kind.FORWARD, *reader)] for reader in readers(stage, m, stages, routes))
    seconds = [_seconds(action, len(groups[action.stage]), places, durations, on_sets) for action in actions]
    groups_of, stage_of = (
        zip(*((groups[a.stage], index[a.stage]) for a in actions), strict=True) if actions else ((), ())
    )
    tables = tuple(before), tuple(previous), tuple(map(tuple, sequences)), stage_of
    backwards = len(order) + len(fillers[0])
    return FillProblem(actions, len(order), backwards, tuple(seconds), groups_of, *tables, ends, stages.stages)


def _seconds(
    action: Action, groups: int, places: Places, durations: Durations, on_sets: SetDurations | None
) -> tuple[float, ...]:
    """On each set of tracks those of the slowest set of ranks in it."""
    each = on_sets(action) if on_sets is not None else ()
    if not each:
        return (durations(action),) * groups
    out = [0.0] * groups
    for place, seconds in zip(places[action.stage], each, strict=True):
        out[place] = max(out[place], seconds)
    return tuple(out)


def _let_go(
    order: Sequence[Action], stages: StageGraph, routes: Routes, training: bool, caps: Mapping[Stage, int]
) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """What comes before a forward of the LLM's module so that its stage holds no more than its cap, where no backward
    of its own does: the forwards that read as many microbatches before it."""
    forwards: dict[Stage, list[int]] = {}
    for i, action in enumerate(order):
        stage = action.stage
        if action.kind is not Kind.FORWARD or (training and stage in stages.backward_stages) or stage not in caps:
            continue
        earlier = forwards.setdefault(stage, [])
        if 0 < caps[stage] <= len(earlier):
            read = readers(stage, earlier[-caps[stage]], stages, routes)
            yield i, tuple(Action(Kind.FORWARD, *reader) for reader in read)
        earlier.append(action.microbatch)


Flows = Mapping[tuple[Stage, int, Stage, int], set[tuple[int, int]]]
"""Pairs of sets, by source and destination of a route between modules."""


def _needed(flows: Flows, groups: Mapping[Stage, Groups], action: Action, other: Action) -> Needed:
    ends = (other.stage, other.microbatch, action.stage, action.microbatch)
    own = range(len(groups[action.stage]))
    if ends in flows:
        return tuple(tuple(sorted(a for a, b in flows[ends] if b == g)) for g in own)
    if (back := (*ends[2:], *ends[:2])) in flows:
        return tuple(tuple(sorted(b for a, b in flows[back] if a == g)) for g in own)
    alike = ends[0].module == ends[2].module and len(groups[ends[0]]) == len(own)
    return tuple((g,) for g in own) if alike else None


def _flows(
    stages: StageGraph, routes: Routes, lanes: Lanes | None, groups: Mapping[Stage, Groups], places: Places
) -> Flows:
    found: dict[tuple[Stage, int, Stage, int], set[tuple[int, int]]] = {}
    missing = set()
    if lanes is None:
        return found
    for edge in stages.edges:
        for route in routes.along(edge) if not edge.internal else ():
            ends = edge.source, route.source, edge.destination, route.destination
            if route in lanes.flows:
                pairs = {(places[edge.source][a], places[edge.destination][b]) for a, b in lanes.flows[route]}
                found.setdefault(ends, set()).update(pairs)
            else:
                missing.add(ends)
    return {ends: pairs for ends, pairs in found.items() if ends not in missing}


Places = Mapping[Stage, tuple[int, ...]]
"""Per stage, which of its sets of tracks each of its sets of ranks is in."""


def _groups(stages: StageGraph, lanes: Lanes | None) -> tuple[dict[Stage, Groups], dict[Stage, tuple[int, ...]], int]:
    """Per stage its sets of tracks, and which each set of ranks is in; how many tracks there are."""
    classes = stages.rank_classes()
    track = {rank: number for number, (ranks, _) in enumerate(classes) for rank in ranks}
    groups: dict[Stage, Groups] = {}
    places: dict[Stage, tuple[int, ...]] = {}
    for stage in stages.stages:
        given = lanes.groups.get(stage) if lanes is not None else None
        sets = [{track[rank] for rank in some} for some in given or (stages.ranks_of(stage),)]
        merged: list[set[int]] = []
        for tracks in sets:
            joined = tracks.union(*(group for group in merged if group & tracks))
            merged = [group for group in merged if not group & tracks] + [joined]
        groups[stage] = tuple(sorted(tuple(sorted(group)) for group in merged))
        number = {track: i for i, group in enumerate(groups[stage]) for track in group}
        places[stage] = tuple(number[min(tracks)] for tracks in sets)
    return groups, places, len(classes)
