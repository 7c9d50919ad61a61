"""Actions and schedules: what happens in a step, as a total order that every rank knows, and what makes one valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from hetmesh.errors import ScheduleError
from hetmesh.graph import Edge, Route, Routes, Stage, StageGraph, microbatches_text


@dataclass(frozen=True)
class PolicyOptions:
    """Parameters of policies; each reads those that concern it.

    Attributes:
        window: three_phase: microbatches whose encoder forwards come together; None: all of the step.
        recompute: three_phase: encoders keep only their inputs and run their forward again before their backward.
        offload: three_phase: waiting activations of encoders are kept in the memory of the host.
        early: interleaved: warm up with twice as many forwards per later rank, as Megatron-LM does, which hides the
            latency of messages. Otherwise with as few as keep the makespan, which holds fewer activations.
        inner: bubble_fill: the schedule of the LLM whose gaps are filled, `"1f1b"`, `"interleaved"` or `"zero_bubble"`.
        refine: bubble_fill: False: the coarse placement alone, for comparison.
        in_flight: bubble_fill: microbatches that a stage of an encoder may hold at a time; None: twice as many as the
            LLM's order needs.
        raise_in_flight: bubble_fill: what the LLM's order needs is held where `in_flight` is less, not refused.
        in_collectives: bubble_fill: encoders also run in the LLM's collectives (`Schedule.in_collectives`).
        validated: False: for a search, which simulates hundreds of schedules and runs none.
    """

    window: int | None = None
    recompute: bool = False
    offload: bool = False
    early: bool = False
    inner: str = "1f1b"
    refine: bool = True
    in_flight: int | None = None
    raise_in_flight: bool = False
    in_collectives: bool = False
    validated: bool = True


DEFAULT = PolicyOptions()


NO_STAGES: frozenset[Stage] = frozenset()


class Kind(StrEnum):
    """What an action does. SEND and RECV have an edge as target, all others a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECV = "RECV"
    REDUCE = "REDUCE"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of work.

    Attributes:
        target: a stage, or the edge along which rows (or, on a reversed edge, gradients) travel.
        microbatch: which microbatch, of an edge the one of its source; -1 for REDUCE, which comes once per step.
        to: of an edge whose ends have different microbatches, the one of its destination; None otherwise.
    """

    kind: Kind
    target: Stage | Edge
    microbatch: int
    to: int | None = None

    @classmethod
    def along(cls, kind: Kind, route: Route) -> Action:
        """SEND or RECV of what travels along `route`."""
        return cls(kind, *route[:2]) if route[1] == route[2] else cls(kind, *route)

    @property
    def stage(self) -> Stage:
        assert isinstance(self.target, Stage)
        return self.target

    @property
    def route(self) -> Route:
        assert isinstance(self.target, Edge)
        return Route(self.target, self.microbatch, self.microbatch if self.to is None else self.to)

    def __str__(self) -> str:
        if self.microbatch < 0:
            return f"{self.target} {self.kind}"
        to = self.microbatch if self.to is None else self.to
        return f"{self.target} {self.kind}{microbatches_text(self.microbatch, to)}"


@dataclass(frozen=True)
class Schedule:
    """A total order of actions over a stage graph; each rank runs the subsequence that names its stages.

    Attributes:
        stages: the stage graph.
        routes: the microbatches of each module, and which feed which.
        actions: the order.
        training: False for a forward pass alone.
        split: stages whose backward comes as BACKWARD_INPUT and BACKWARD_WEIGHT; the others' comes as BACKWARD.
        in_flight: stage -> microbatches that it may hold at a time, from their forward to the end of their backward
            (where none comes, to the last forward that reads them). Stages left out hold as many as come.
        recompute: stages whose forward keeps only its inputs and is run again right before the backward.
        offload: stages whose waiting activations are kept in the memory of the host.
        beside: stages that run in the gaps of the others on their ranks, and may overlap with them there.
        in_collectives: whether they do so in collectives of the others, too: an action of theirs may then begin before
            its place (`hetmesh.schedule.windows`), at which it is over.
    """

    stages: StageGraph
    routes: Routes
    actions: tuple[Action, ...]
    training: bool = True
    split: frozenset[Stage] = NO_STAGES
    in_flight: Mapping[Stage, int] = field(default_factory=lambda: MappingProxyType({}))
    recompute: frozenset[Stage] = NO_STAGES
    offload: frozenset[Stage] = NO_STAGES
    beside: frozenset[Stage] = NO_STAGES
    in_collectives: bool = False

    def of_rank(self, rank: int) -> tuple[Action, ...]:
        """The actions in which `rank` takes part. A receiver takes part in the SEND: it posts its receives there."""
        held = {stage for stage in self.stages.stages if rank in self.stages.ranks_of(stage)}
        return tuple(action for action in self.actions if takes_part(action, held))

    def peaks_in_flight(self) -> dict[Stage, int]:
        """Per stage, the most microbatches that it holds at a time."""
        return peaks_in_flight(self.actions, self.stages, self.routes, self.training, self.split)


def takes_part(action: Action, held: frozenset[Stage] | set[Stage] | Mapping[Stage, object]) -> bool:
    """Whether a rank that holds the stages `held` takes part in `action`."""
    target = action.target
    if isinstance(target, Stage):
        return target in held
    return target.destination in held or (action.kind is Kind.SEND and target.source in held)


def backward_kinds(stage: Stage, stages: StageGraph, split: frozenset[Stage] = NO_STAGES) -> tuple[Kind, ...]:
    """The actions that make up the backward of `stage`, in order."""
    if stage not in stages.backward_stages:
        return ()
    return (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if stage in split else (Kind.BACKWARD,)


def required(
    stages: StageGraph, routes: Routes, training: bool = True, split: frozenset[Stage] = NO_STAGES
) -> Iterator[Action]:
    """Every action that a step consists of, in no particular order."""
    for e in stages.edges:
        back = training and e in stages.gradient_edges
        for route in routes.along(e):
            for way in (route, route.reversed) if back else (route,):
                yield from (Action.along(Kind.SEND, way), Action.along(Kind.RECV, way))
    for s in stages.stages:
        kinds = (Kind.FORWARD, *(backward_kinds(s, stages, split) if training else ()))
        yield from (Action(kind, s, m) for m in range(routes.count(s.module)) for kind in kinds)
    if training:
        yield from (Action(Kind.REDUCE, s, -1) for s in stages.stages if s in stages.trainable_stages)


def dependencies(
    action: Action, stages: StageGraph, routes: Routes, split: frozenset[Stage] = NO_STAGES
) -> Iterator[Action]:
    """The actions that must come before `action`."""
    m, target, kind = action.microbatch, action.target, action.kind
    if isinstance(target, Edge):
        if kind is Kind.RECV:
            yield Action(Kind.SEND, target, m, action.to)
        elif target in stages.edges:
            yield Action(Kind.FORWARD, target.source, m)
        else:
            yield Action(backward_kinds(target.source, stages, split)[0], target.source, m)
    elif kind is Kind.FORWARD:
        yield from (Action.along(Kind.RECV, route) for route in routes.into(stages.inputs(target), m))
    elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        yield Action(Kind.FORWARD, target, m)
        gradients = routes.out_of(stages.gradient_outputs(target), m)
        yield from (Action.along(Kind.RECV, route.reversed) for route in gradients)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, target, m)
    elif kind is Kind.REDUCE:
        last = backward_kinds(target, stages, split)[-1]
        yield from (Action(last, target, i) for i in range(routes.count(target.module)))


def compute_dependencies(
    action: Action, stages: StageGraph, routes: Routes, split: frozenset[Stage]
) -> Iterator[Action]:
    """The compute actions that must be over before `action`: `dependencies` with the messages left out."""
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        for edge, source, _ in routes.into(stages.inputs(stage), m):
            yield Action(Kind.FORWARD, edge.source, source)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, stage, m)
    else:
        yield Action(Kind.FORWARD, stage, m)
        for edge, _, to in routes.out_of(stages.gradient_outputs(stage), m):
            yield Action(backward_kinds(edge.destination, stages, split)[0], edge.destination, to)


def readers(stage: Stage, microbatch: int, stages: StageGraph, routes: Routes) -> tuple[tuple[Stage, int], ...]:
    """The consumers of a microbatch, once each: one may read several outputs."""
    some = routes.out_of(stages.outputs(stage), microbatch)
    return tuple(dict.fromkeys((route.edge.destination, route.destination) for route in some))


def holding(
    actions: Iterable[Action],
    stages: StageGraph,
    routes: Routes,
    training: bool = True,
    split: frozenset[Stage] = NO_STAGES,
) -> Iterator[tuple[Stage, int, int]]:
    """(stage, microbatch, 1) where a stage begins to hold a microbatch, and (stage, microbatch, -1) where it lets go.

    A stage without a backward holds a microbatch until the last forward that reads it, if any.
    """
    last = {s: (backward_kinds(s, stages, split) or (None,))[-1] if training else None for s in stages.stages}
    waiting: dict[tuple[Stage, int], int] = {}
    for action in actions:
        target, m = action.target, action.microbatch
        if not isinstance(target, Stage):
            continue
        if action.kind is Kind.FORWARD:
            if last[target] is not None:
                yield target, m, 1
            elif count := len(readers(target, m, stages, routes)):
                waiting[target, m] = count
                yield target, m, 1
            producers = [(r.edge.source, r.source) for r in routes.into(stages.inputs(target), m)]
            for producer in dict.fromkeys(producers):
                if producer in waiting:
                    waiting[producer] -= 1
                    if not waiting[producer]:
                        del waiting[producer]
                        yield (*producer, -1)
        elif action.kind is last[target]:
            yield target, m, -1


def peaks_in_flight(
    actions: Iterable[Action],
    stages: StageGraph,
    routes: Routes,
    training: bool = True,
    split: frozenset[Stage] = NO_STAGES,
) -> dict[Stage, int]:
    """Per stage, the most microbatches that it holds at a time."""
    held, most = dict.fromkeys(stages.stages, 0), dict.fromkeys(stages.stages, 0)
    for stage, _, change in holding(actions, stages, routes, training, split):
        held[stage] += change
        most[stage] = max(most[stage], held[stage])
    return most


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule` if every required action comes exactly once, after all it depends on, and within the caps.

    A total order in which dependencies hold cannot deadlock, whatever the relative speed of ranks: each rank's next
    action waits only for actions that come earlier in the order, and of all unfinished actions the earliest can run.
    Messages between two ranks have the same order on both, because both take part in a SEND at its place in the order.
    Raises ScheduleError: names the first action that is missing, superfluous, repeated, too early or beyond a cap.
    """
    stages, routes, split = schedule.stages, schedule.routes, schedule.split
    wanted = set(required(stages, routes, schedule.training, split))
    given = Counter(schedule.actions)
    for action in schedule.actions:
        if action not in wanted:
            raise ScheduleError(f"schedule: action {action} does not belong to this step")
        if given[action] > 1:
            raise ScheduleError(f"schedule: action {action} comes {given[action]} times")
    missing = sorted(str(action) for action in wanted - set(given))
    if missing:
        raise ScheduleError(f"schedule: missing actions {missing[:8]}")
    done = set()
    for action in schedule.actions:
        for before in dependencies(action, stages, routes, split):
            if before not in done:
                raise ScheduleError(f"schedule: {action} comes before {before}, which it needs")
        done.add(action)
    most = schedule.peaks_in_flight()
    for stage, cap in schedule.in_flight.items():
        if most[stage] > cap:
            raise ScheduleError(f"schedule: stage {stage} holds {most[stage]} microbatches at a time, its cap is {cap}")
    return schedule


def with_messages(
    order: Iterable[Action],
    stages: StageGraph,
    routes: Routes,
    split: frozenset[Stage],
    last: Iterable[Action] = (),
    early: frozenset[Stage] = NO_STAGES,
) -> tuple[Action, ...]:
    """`order` with its messages: received right before they are used, sent right after they are made.

    Args:
        last: the last backward action of each stage whose gradients are then reduced.
        early: stages that receive gradients from others as soon as these have been sent; where the others have several
            stages, one action of those later, so that no rank waits for another that is behind.
    """
    ends = set(last)
    out: list[Action] = []
    coming: list[Action] = []  # what `early` stages have yet to receive
    at_once = len({stage for stage in stages.stages if stage not in early}) == 1
    for action in order:
        stage, m, kind = action.stage, action.microbatch, action.kind
        forward, weights_alone = kind is Kind.FORWARD, kind is Kind.BACKWARD_WEIGHT
        inputs, outputs = stages.inputs(stage), stages.outputs(stage)
        if forward:
            out += [Action.along(Kind.RECV, route) for route in routes.into(inputs, m)]
        elif not weights_alone:
            received = [Action.along(Kind.RECV, r.reversed) for r in routes.out_of(stages.gradient_outputs(stage), m)]
            if not set(received).isdisjoint(coming):
                out, coming = out + coming, []
            outside = [r for r in received if stage not in early or r.route.edge.source in early]
            out += outside
        out.append(action)
        if stage not in early:
            out, coming = out + coming, []
        if forward:
            out += [Action.along(Kind.SEND, route) for route in routes.out_of(outputs, m)]
        elif not weights_alone:
            edges = [edge for edge in inputs if edge in stages.gradient_edges]
            sent = [route.reversed for route in routes.into(edges, m)]
            out += [Action.along(Kind.SEND, route) for route in sent]
            if stage not in early:
                coming += [Action.along(Kind.RECV, route) for route in sent if route.edge.destination in early]
                if at_once:
                    out, coming = out + coming, []
        if action in ends:
            out.append(Action(Kind.REDUCE, stage, -1))
    return tuple(out)


def schedule_of(
    order: Sequence[Action],
    stages: StageGraph,
    routes: Routes,
    training: bool,
    in_flight: Mapping[Stage, int],
    split: frozenset[Stage] = NO_STAGES,
    validated: bool = True,
    beside: frozenset[Stage] = NO_STAGES,
    in_collectives: bool = False,
    recompute: frozenset[Stage] = NO_STAGES,
    offload: frozenset[Stage] = NO_STAGES,
) -> Schedule:
    """The validated schedule of compute actions in that order, with messages and, after last backwards, reductions.

    Args:
        validated: False: it is not.
        beside, in_collectives, recompute, offload: of the schedule.
    """
    last: dict[Stage, Action] = {}
    for action in order if training else ():
        kinds = backward_kinds(action.stage, stages, split)
        if action.stage in stages.trainable_stages and kinds and action.kind is kinds[-1]:
            last[action.stage] = action
    actions = with_messages(order, stages, routes, split, last.values(), beside if in_collectives else NO_STAGES)
    schedule = Schedule(stages, routes, actions, training, split, in_flight, recompute, offload, beside, in_collectives)
    return validate(schedule) if validated else schedule
