"""List scheduling: from what each group of stages would do next to one total order of the step.

A policy says, for every group of stages that takes turns, which actions may come next, best first. The scheduler lets
the groups run side by side in nominal time, always starts the action that can start first, and writes the actions down
in the order of their starts. Dependencies hold by construction, so a wrong idea of durations costs time at most.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetmesh.errors import ScheduleError
from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.schedule import Action, Kind, backward_kinds

Durations = Callable[[Action], float]
"""Seconds, or any other unit, that a compute action takes."""

SetDurations = Callable[[Action], Sequence[float]]
"""The same on each set of ranks that starts the action by itself; nothing where all take equally long."""

NOMINAL = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def nominal(stages: StageGraph, routes: Routes, split: frozenset[Stage] = frozenset()) -> Durations:
    """A backward takes twice as long as a forward, and all ranks are equally busy: stages share the time of their rank.

    Where one rank seemed busier than the rest, as the one that also holds a projector would be by its number of stages,
    the others would take their backwards early while they wait for it, and fall into step with it for good.
    """
    busy: dict[int, int] = {}
    for stage, ranks in zip(stages.stages, stages.ranks, strict=True):
        kinds = (Kind.FORWARD, *backward_kinds(stage, stages, split))
        seconds = max(routes.count(stage.module), 1) * int(sum(NOMINAL[kind] for kind in kinds))
        for rank in ranks:
            busy[rank] = busy.get(rank, 0) + seconds
    common = math.lcm(*busy.values())  # sums of whole numbers are exact: who is first does not depend on rounding
    share = {stage: common // max(busy[rank] for rank in stages.ranks_of(stage)) for stage in stages.stages}
    return lambda action: NOMINAL[action.kind] * share[_stage(action)]


class Group(Protocol):
    """Stages that take turns by one rule. It keeps its own progress."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages whose actions it proposes."""
        ...

    def proposals(self) -> Iterable[Action]:
        """What may come next, best first; nothing when it is done. It need not know what is ready."""
        ...

    def started(self, action: Action) -> None:
        """`action`, one of its proposals, was chosen."""
        ...

    def finished(self, action: Action) -> None:
        """Another group's action was chosen (for caps that depend on consumers)."""
        ...


@dataclass(frozen=True)
class _Choice:
    start: float
    preference: int
    action: Action


def list_schedule(
    stages: StageGraph,
    routes: Routes,
    groups: Sequence[Group],
    durations: Durations,
    split: frozenset[Stage] = frozenset(),
    given: Iterable[Action] = (),
) -> list[Action]:
    """The compute actions of all groups in the order of their starts.

    Args:
        given: actions that are over before it begins.

    Raises:
        ScheduleError: no group can go on; names what they wait for.
    """
    return _Scheduler(stages, routes, groups, durations, split, given).run()


class _Scheduler:
    def __init__(
        self,
        stages: StageGraph,
        routes: Routes,
        groups: Sequence[Group],
        durations: Durations,
        split: frozenset[Stage],
        given: Iterable[Action],
    ) -> None:
        self.stages, self.routes, self.groups, self.durations, self.split = stages, routes, groups, durations, split
        self.finish: dict[Action, float] = dict.fromkeys(given, 0.0)
        self.free: dict[int, float] = {}
        self.before: dict[Action, tuple[Action, ...]] = {}
        ranks = [frozenset(r for s in g.stages for r in stages.ranks_of(s)) for g in groups]
        near: list[set[int]] = [set() for _ in groups]
        home = {stage: i for i, g in enumerate(groups) for stage in g.stages}
        for i, own in enumerate(ranks):
            near[i] |= {j for j, other in enumerate(ranks) if own & other}
        for edge in stages.edges:
            if edge.source in home and edge.destination in home:
                near[home[edge.source]].add(home[edge.destination])
                near[home[edge.destination]].add(home[edge.source])
        self.near = [sorted(some) for some in near]

    def run(self) -> list[Action]:
        order: list[Action] = []
        queue: list[tuple[float, int, int, int, Action]] = []
        versions = [0] * len(self.groups)

        def propose(i: int) -> None:
            versions[i] += 1
            if (choice := self._best(self.groups[i])) is not None:
                heapq.heappush(queue, (choice.start, choice.preference, i, versions[i], choice.action))

        for i in range(len(self.groups)):
            propose(i)
        while queue:
            start, _, i, version, action = heapq.heappop(queue)
            if version != versions[i]:
                continue
            order.append(action)
            end = start + self.durations(action)
            self.finish[action] = end
            for rank in self.stages.ranks_of(_stage(action)):
                self.free[rank] = end
            self.groups[i].started(action)
            for j in self.near[i]:
                if j != i:
                    self.groups[j].finished(action)
                propose(j)
        waiting = [str(a) for group in self.groups for a in list(group.proposals())[:1]]
        if waiting:
            raise ScheduleError(f"schedule: no stage can go on; next would be {waiting[:8]}")
        return order

    def _best(self, group: Group) -> _Choice | None:
        best: _Choice | None = None
        for preference, action in enumerate(group.proposals()):
            ready = self._ready(action)
            if ready is None:
                continue
            start = max([ready, *(self.free.get(rank, 0.0) for rank in self.stages.ranks_of(_stage(action)))])
            if best is None or start < best.start:
                best = _Choice(start, preference, action)
        return best

    def _ready(self, action: Action) -> float | None:
        if action not in self.before:  # asked again whenever something near it ends
            self.before[action] = tuple(compute_dependencies(action, self.stages, self.routes, self.split))
        times = [self.finish.get(before) for before in self.before[action]]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None


def compute_dependencies(
    action: Action, stages: StageGraph, routes: Routes, split: frozenset[Stage]
) -> Iterator[Action]:
    """The compute actions that must be over before `action`: `dependencies` with the messages left out."""
    stage, m = _stage(action), action.microbatch
    if action.kind is Kind.FORWARD:
        for edge, source, _ in routes.into(stages.inputs(stage), m):
            yield Action(Kind.FORWARD, edge.source, source)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, stage, m)
    else:
        yield Action(Kind.FORWARD, stage, m)
        for edge, _, to in routes.out_of(stages.gradient_outputs(stage), m):
            yield Action(backward_kinds(edge.destination, stages, split)[0], edge.destination, to)


def with_messages(
    order: Iterable[Action], stages: StageGraph, routes: Routes, split: frozenset[Stage], last: Iterable[Action] = ()
) -> tuple[Action, ...]:
    """`order` with its messages: received right before they are used, sent right after they are made.

    Args:
        last: the last backward action of each stage whose gradients are then reduced.
    """
    ends = set(last)
    out: list[Action] = []
    for action in order:
        stage, m = _stage(action), action.microbatch
        forward = action.kind is Kind.FORWARD
        if forward:
            out += [Action.along(Kind.RECV, route) for route in routes.into(stages.inputs(stage), m)]
        elif action.kind is not Kind.BACKWARD_WEIGHT:
            gradients = routes.out_of(stages.gradient_outputs(stage), m)
            out += [Action.along(Kind.RECV, route.reversed) for route in gradients]
        out.append(action)
        if forward:
            out += [Action.along(Kind.SEND, route) for route in routes.out_of(stages.outputs(stage), m)]
        elif action.kind is not Kind.BACKWARD_WEIGHT:
            wanted = [edge for edge in stages.inputs(stage) if edge in stages.gradient_edges]
            out += [Action.along(Kind.SEND, route.reversed) for route in routes.into(wanted, m)]
        if action in ends:
            out.append(Action(Kind.REDUCE, stage, -1))
    return tuple(out)


def last_backwards(order: Sequence[Action], stages: StageGraph, split: frozenset[Stage]) -> list[Action]:
    """The last action of each trainable stage's backward in `order`."""
    last: dict[Stage, Action] = {}
    for action in order:
        stage = _stage(action)
        kinds = backward_kinds(stage, stages, split)
        if stage in stages.trainable_stages and kinds and action.kind is kinds[-1]:
            last[stage] = action
    return list(last.values())


def _stage(action: Action) -> Stage:
    assert isinstance(action.target, Stage)
    return action.target
