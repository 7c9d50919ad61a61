"""Actions and schedules: what happens in a step, as a total order that every rank knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from hetmesh.graph import Edge, Route, Routes, Stage, StageGraph, microbatches_text


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
        kind: what is done.
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
    def route(self) -> Route:
        """The route of a SEND or RECV."""
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
    """

    stages: StageGraph
    routes: Routes
    actions: tuple[Action, ...]
    training: bool = True
    split: frozenset[Stage] = frozenset()
    in_flight: Mapping[Stage, int] = field(default_factory=lambda: MappingProxyType({}))
    recompute: frozenset[Stage] = frozenset()
    offload: frozenset[Stage] = frozenset()
    beside: frozenset[Stage] = frozenset()

    def of_rank(self, rank: int) -> tuple[Action, ...]:
        """The actions in which `rank` takes part. Both sides of an edge take part in its SEND: the receiving one posts
        its receives there."""
        held = {stage for stage in self.stages.stages if rank in self.stages.ranks_of(stage)}
        return tuple(action for action in self.actions if takes_part(action, held))


def takes_part(action: Action, held: frozenset[Stage] | set[Stage] | Mapping[Stage, object]) -> bool:
    """Whether a rank that holds the stages `held` takes part in `action`."""
    target = action.target
    if isinstance(target, Stage):
        return target in held
    return target.destination in held or (action.kind is Kind.SEND and target.source in held)


def backward_kinds(stage: Stage, stages: StageGraph, split: frozenset[Stage]) -> tuple[Kind, ...]:
    """The actions that make up the backward of `stage`, in order."""
    if stage not in stages.backward_stages:
        return ()
    return (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if stage in split else (Kind.BACKWARD,)


def splittable(stages: StageGraph) -> frozenset[Stage]:
    """The stages whose backward has two parts: both the gradient of an input and those of parameters are wanted."""
    wanted = {edge.destination for edge in stages.gradient_edges}
    return stages.trainable_stages & wanted


def required(
    stages: StageGraph, routes: Routes, training: bool = True, split: frozenset[Stage] = frozenset()
) -> Iterator[Action]:
    """Every action that a step consists of, in no particular order."""
    for e in stages.edges:
        back = training and e in stages.gradient_edges
        for route in routes.along(e):
            for each in (route, route.reversed) if back else (route,):
                yield from (Action.along(Kind.SEND, each), Action.along(Kind.RECV, each))
    for s in stages.stages:
        kinds = (Kind.FORWARD, *(backward_kinds(s, stages, split) if training else ()))
        yield from (Action(kind, s, m) for m in range(routes.count(s.module)) for kind in kinds)
    if training:
        yield from (Action(Kind.REDUCE, s, -1) for s in stages.stages if s in stages.trainable_stages)


def dependencies(
    action: Action, stages: StageGraph, routes: Routes, split: frozenset[Stage] = frozenset()
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
