"""The rules by which stages choose what comes next; policies put them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hetmesh.errors import ScheduleError
from hetmesh.graph import Edge, Routes, Stage, StageGraph
from hetmesh.schedule.held import peaks_in_flight, readers
from hetmesh.schedule.one_by_one import by_stage, forwards_before
from hetmesh.schedule.schedule import Action, Kind, backward_kinds


class Capped:
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
        *,
        forwards: Sequence[int] = (),
        backwards: Sequence[int] = (),
        split: frozenset[Stage] = frozenset(),
    ) -> None:
        self.stage, self.graph, self.routes, self.cap = stage, stages, routes, cap
        kinds = backward_kinds(stage, stages, split) if backwards else ()
        self.order = (*kinds[:1], Kind.FORWARD, *kinds[1:])
        self.work = dict.fromkeys(kinds, backwards) | {Kind.FORWARD: forwards}
        self.done = dict.fromkeys(self.order, 0)
        self.last = kinds[-1] if kinds else None
        self.consumers = frozenset(edge.destination for edge in stages.outputs(stage))
        self.unread: dict[int, int] = {}  # where no backward ends it: forwards that have yet to read a microbatch
        self.read = 0
        self.latest: Kind | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.stage,)

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


class Fixed:
    """Stages that take turns in a fixed order."""

    def __init__(self, stages: tuple[Stage, ...], sequence: Sequence[Action]) -> None:
        self._stages, self.sequence, self.position = stages, sequence, 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self._stages

    def proposals(self) -> Iterator[Action]:
        if self.position < len(self.sequence):
            yield self.sequence[self.position]

    def started(self, action: Action) -> None:
        self.position += 1

    def finished(self, action: Action) -> None:
        """A fixed order does not depend on others."""


def caps_by_distance(
    stages: StageGraph, routes: Routes, steps: Sequence[Sequence[Action]], given: Mapping[Stage, int] | None = None
) -> dict[Stage, int]:
    """How many microbatches each stage may hold: what its consumers need to hold as many as they may and have their
    next one ready; the sink 1.

    So a stage warms up with as many forwards as it has stages between itself and the *sink*: encoders of unequal depth
    all have their first microbatch ready when the LLM wants it, and none runs further ahead than it must. Where a
    microbatch needs two of the stage before, or the second half of it waits for the next one, it is one more.

    Args:
        steps: from `one_by_one`: no stage may hold fewer than there.
        given: caps that a policy fixes.

    Raises:
        ScheduleError: a given cap is lower than that.
    """
    actions = [action for step in steps for action in step]
    training = any(action.kind is Kind.BACKWARD for action in actions)
    least = peaks_in_flight(actions, stages, routes, training)
    backwards = by_stage(steps, Kind.BACKWARD)
    caps: dict[Stage, int] = {}
    for stage in reversed(stages.stages):
        ahead = [run_ahead(routes, e, caps[e.destination], backwards.get(e.destination)) for e in stages.outputs(stage)]
        caps[stage] = (given or {}).get(stage, max([1, *ahead, least[stage]]))
        if caps[stage] < least[stage]:
            raise ScheduleError(
                f"schedule: stage {stage} may hold {caps[stage]} microbatches at a time, but the microbatches it feeds "
                f"need {least[stage]} of them, even one after the other"
            )
    return caps


def run_ahead(routes: Routes, edge: Edge, cap: int, released: Sequence[int] | None = None) -> int:
    """How many microbatches the source of an edge holds if its destination holds `cap` and the next one is ready.

    Args:
        released: the destination's microbatches in the order in which it lets go of them; None: by number.
    """
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
