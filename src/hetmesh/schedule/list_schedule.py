"""List scheduling: from what each group of stages would do next to one total order of the step."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hetmesh.errors import ScheduleError
from hetmesh.graph import Edge, Routes, Stage, StageGraph
from hetmesh.schedule.schedule import (
    NO_STAGES,
    Action,
    Kind,
    backward_kinds,
    compute_dependencies,
    peaks_in_flight,
    readers,
)
from hetmesh.schedule.sequential import by_stage, forwards_before

Durations = Callable[[Action], float]
"""Seconds, or any other unit, that a compute action takes."""

SetDurations = Callable[[Action], Sequence[float]]
"""The same on each set of ranks that starts the action by itself; nothing where all take equally long."""

NOMINAL_DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def nominal(stages: StageGraph, routes: Routes, split: frozenset[Stage] = frozenset()) -> Durations:
    """A backward takes twice as long as a forward, and all ranks are equally busy: stages share the time of their rank.

    Where one rank seemed busier than the rest, as the one that also holds a projector would be by its number of stages,
    the others would take their backwards early while they wait for it, and fall into step with it for good.
    """
    busy: dict[int, int] = {}
    for stage, ranks in zip(stages.stages, stages.ranks, strict=True):
        kinds = (Kind.FORWARD, *backward_kinds(stage, stages, split))
        seconds = max(routes.count(stage.module), 1) * int(sum(NOMINAL_DURATIONS[kind] for kind in kinds))
        for rank in ranks:
            busy[rank] = busy.get(rank, 0) + seconds
    common = math.lcm(*busy.values())  # sums of whole numbers are exact: who is first does not depend on rounding
    share = {stage: common // max(busy[rank] for rank in stages.ranks_of(stage)) for stage in stages.stages}
    return lambda action: NOMINAL_DURATIONS[action.kind] * share[action.stage]


class Group(ABC):
    """Stages that take turns by one rule, and whose actions it proposes. It keeps its progress."""

    stages: tuple[Stage, ...]

    @abstractmethod
    def proposals(self) -> Iterable[Action]:
        """What may come next, best first; nothing when it is done. It need not know what is ready."""

    @abstractmethod
    def started(self, action: Action) -> None:
        """`action`, one of its proposals, was chosen."""

    def finished(self, action: Action) -> None:  # noqa: B027
        """Another group's action was chosen (for caps that depend on consumers)."""


def list_schedule(
    stages: StageGraph,
    routes: Routes,
    groups: Sequence[Group],
    durations: Durations,
    split: frozenset[Stage] = NO_STAGES,
    given: Iterable[Action] = (),
) -> list[Action]:
    """The compute actions of all groups in the order of their starts. `given`: actions that are over before it begins.
    Raises ScheduleError: no group can go on; names what they wait for."""
    finish = dict.fromkeys(given, 0.0)
    free: dict[int, float] = {}  # per class of ranks, which are always free at the same time
    classes = list(enumerate(stages.rank_classes()))
    classes_of = {stage: [c for c, (_, held) in classes if i in held] for i, stage in enumerate(stages.stages)}
    needed: dict[Action, tuple[Action, ...]] = {}  # asked again whenever something near an action ends
    near = _near(stages, groups)
    versions = [0] * len(groups)
    queue: list[tuple[float, int, int, int, Action]] = []  # start, preference, group, its version, action

    def ready(action: Action) -> float | None:
        if action not in needed:
            needed[action] = tuple(compute_dependencies(action, stages, routes, split))
        times = [finish.get(before) for before in needed[action]]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def propose(i: int) -> None:
        versions[i] += 1
        best: tuple[float, int, Action] | None = None
        for preference, action in enumerate(groups[i].proposals()):
            if (time := ready(action)) is None:
                continue
            start = max([time, *(free.get(own, 0.0) for own in classes_of[action.stage])])
            if best is None or start < best[0]:
                best = start, preference, action
        if best is not None:
            heapq.heappush(queue, (best[0], best[1], i, versions[i], best[2]))

    order: list[Action] = []
    for i in range(len(groups)):
        propose(i)
    while queue:
        start, _, i, version, action = heapq.heappop(queue)
        if version != versions[i]:
            continue
        order.append(action)
        finish[action] = end = start + durations(action)
        free |= dict.fromkeys(classes_of[action.stage], end)
        groups[i].started(action)
        for j in near[i]:
            if j != i:
                groups[j].finished(action)
            propose(j)
    if waiting := [str(action) for group in groups for action in list(group.proposals())[:1]]:
        raise ScheduleError(f"schedule: no stage can go on; next would be {waiting[:8]}")
    return order


def _near(stages: StageGraph, groups: Sequence[Group]) -> list[list[int]]:
    """Per group those whose next action may depend on its last one: on the same ranks, or joined by an edge."""
    ranks = [frozenset(rank for stage in group.stages for rank in stages.ranks_of(stage)) for group in groups]
    near = [{j for j, others in enumerate(ranks) if own & others} for own in ranks]
    home = {stage: i for i, group in enumerate(groups) for stage in group.stages}
    for edge in stages.edges:
        if edge.source in home and edge.destination in home:
            near[home[edge.source]].add(home[edge.destination])
            near[home[edge.destination]].add(home[edge.source])
    return [sorted(some) for some in near]


class Capped(Group):
    """One stage that prefers backwards to forwards, takes them in turn, and holds at most `cap` microbatches at a
    time: 1F1B.

    With a split backward the part that others wait for comes first, then a forward, and the weights' part where
    nothing else can start: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), schedule ZB-H1.

    Args:
        cap: None for no limit.
        forwards, backwards: the microbatches to run, in order.
    """

    def __init__(
        self,
        stage: Stage,
        stages: StageGraph,
        routes: Routes,
        cap: int | None,
        forwards: Sequence[int],
        backwards: Sequence[int],
        split: frozenset[Stage] = NO_STAGES,
    ) -> None:
        self.stage, self.stages, self.graph, self.routes, self.cap = stage, (stage,), stages, routes, cap
        kinds = backward_kinds(stage, stages, split) if backwards else ()
        self.order = (*kinds[:1], Kind.FORWARD, *kinds[1:])
        self.work = dict.fromkeys(kinds, backwards) | {Kind.FORWARD: forwards}
        self.done = dict.fromkeys(self.order, 0)
        self.last = kinds[-1] if kinds else None
        self.consumers = frozenset(edge.destination for edge in stages.outputs(stage))
        self.unread: dict[int, int] = {}  # where no backward ends it: forwards that have yet to read a microbatch
        self.read = 0
        self.latest: Kind | None = None

    def proposals(self) -> Iterator[Action]:
        for kind in self._preferred():
            i = self.done[kind]
            if i < len(self.work[kind]) and (kind is not Kind.FORWARD or not self._full()):
                yield Action(kind, self.stage, self.work[kind][i])

    def _preferred(self) -> Iterable[Kind]:
        """After a backward a forward: where two backwards wait for the same microbatch, both could start at once, and
        stages before and after would fall into their step for good."""
        if self.latest is self.order[0]:
            return (Kind.FORWARD, *(kind for kind in self.order if kind is not Kind.FORWARD))
        return self.order

    def _full(self) -> bool:
        over = self.read if self.last is None else self.done[self.last]
        return self.cap is not None and self.done[Kind.FORWARD] - over >= self.cap

    def started(self, action: Action) -> None:
        self.done[action.kind] += 1
        self.latest = action.kind
        if self.last is None:
            count = len(readers(self.stage, action.microbatch, self.graph, self.routes))
            self.unread[action.microbatch] = count
            self.read += not count

    def finished(self, action: Action) -> None:
        target = action.target
        if self.last is not None or action.kind is not Kind.FORWARD or target not in self.consumers:
            return
        assert isinstance(target, Stage)
        edges = (edge for edge in self.graph.inputs(target) if edge.source == self.stage)
        for m in dict.fromkeys(route.source for route in self.routes.into(edges, action.microbatch)):
            if m in self.unread:  # of an earlier window otherwise
                self.unread[m] -= 1
                self.read += not self.unread[m]


def capped_stages(
    some: Iterable[Stage],
    stages: StageGraph,
    routes: Routes,
    steps: Sequence[Sequence[Action]],
    caps: Mapping[Stage, int] | None,
    split: frozenset[Stage] = NO_STAGES,
    kinds: Iterable[Kind] = (Kind.FORWARD, Kind.BACKWARD),
) -> list[Group]:
    """`Capped` for some stages, by the order of `steps`; caps None: no limits. `kinds`: which actions of `steps` they
    run."""
    forwards, backwards = (by_stage(steps, kind) if kind in kinds else {} for kind in (Kind.FORWARD, Kind.BACKWARD))
    limits = dict.fromkeys(stages.stages) if caps is None else caps
    return [Capped(s, stages, routes, limits[s], forwards.get(s, ()), backwards.get(s, ()), split) for s in some]


class Fixed(Group):
    """Stages that take turns in a fixed order."""

    def __init__(self, stages: tuple[Stage, ...], sequence: Sequence[Action]) -> None:
        self.stages, self.sequence, self.position = stages, sequence, 0

    def proposals(self) -> Iterator[Action]:
        if self.position < len(self.sequence):
            yield self.sequence[self.position]

    def started(self, action: Action) -> None:
        self.position += 1


def caps_by_distance(stages: StageGraph, routes: Routes, steps: Sequence[Sequence[Action]]) -> dict[Stage, int]:
    """How many microbatches each stage may hold: what its consumers need to hold as many as they may and have their
    next one ready; the LLM 1.

    So a stage warms up with as many forwards as it has stages between itself and the LLM: encoders of unequal depth
    all have their first microbatch ready when the LLM wants it, and none runs further ahead than it must. Where a
    microbatch needs two of the stage before, or the second half of it waits for the next one, it is one more.

    Args:
        steps: from `one_by_one`: no stage may hold fewer than there.
    """
    actions = [action for step in steps for action in step]
    training = any(action.kind is Kind.BACKWARD for action in actions)
    least = peaks_in_flight(actions, stages, routes, training)
    backwards = by_stage(steps, Kind.BACKWARD)
    caps: dict[Stage, int] = {}
    for stage in reversed(stages.stages):
        ahead = [run_ahead(routes, e, caps[e.destination], backwards.get(e.destination)) for e in stages.outputs(stage)]
        caps[stage] = max([1, *ahead, least[stage]])
    return caps


def run_ahead(routes: Routes, edge: Edge, cap: int, released: Sequence[int] | None = None) -> int:
    """How many microbatches the source of an edge holds if its destination holds `cap` and the next one is ready.
    `released`: the destination's microbatches in the order in which it lets go of them; None: by number."""
    if routes.same_numbers(edge):
        return cap + 1
    before = forwards_before(routes, edge)
    order = range(len(before) - 1) if released is None else released
    waiting = [sum(1 for _ in routes.out_of((edge,), m)) for m in range(routes.count(edge.source.module))]
    held = most = 0
    for n in range(1, len(before)):
        if n > cap + 1:
            for route in routes.into((edge,), order[n - cap - 2]):
                waiting[route.source] -= 1
                held -= not waiting[route.source]
        held += sum(1 for m in range(before[n - 1], before[n]) if waiting[m])
        most = max(most, held)
    return most
