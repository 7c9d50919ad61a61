"""Actions and schedules: what happens in a step, as a total order that every rank knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hetmesh.graph import Edge, Stage, StageGraph


class Kind(StrEnum):
    """What an action does. FORWARD, BACKWARD and REDUCE have a stage as target, SEND and RECV an edge."""

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
        microbatch: which microbatch; -1 for REDUCE, which comes once per step.
    """

    kind: Kind
    target: Stage | Edge
    microbatch: int

    def __str__(self) -> str:
        return f"{self.target} {self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")


@dataclass(frozen=True)
class Schedule:
    """A total order of actions over a stage graph; each rank runs the subsequence that names its stages.

    Attributes:
        stages: the stage graph.
        microbatches: how many.
        actions: the order.
        training: False for a forward pass alone.
    """

    stages: StageGraph
    microbatches: int
    actions: tuple[Action, ...]
    training: bool = True


def required(stages: StageGraph, microbatches: int, training: bool = True) -> Iterator[Action]:
    """Every action that a step consists of, in no particular order."""
    for m in range(microbatches):
        yield from (Action(Kind.FORWARD, s, m) for s in stages.stages)
        for e in stages.edges:
            yield from (Action(Kind.SEND, e, m), Action(Kind.RECV, e, m))
            if training and e in stages.gradient_edges:
                yield from (Action(Kind.SEND, e.reversed, m), Action(Kind.RECV, e.reversed, m))
        if training:
            yield from (Action(Kind.BACKWARD, s, m) for s in stages.stages if s in stages.backward_stages)
    if training:
        yield from (Action(Kind.REDUCE, s, -1) for s in stages.stages if s in stages.backward_stages)


def dependencies(action: Action, stages: StageGraph, microbatches: int) -> Iterator[Action]:
    """The actions that must come before `action`."""
    m, target = action.microbatch, action.target
    if isinstance(target, Edge):
        if action.kind is Kind.RECV:
            yield Action(Kind.SEND, target, m)
        else:
            forward = target in stages.edges
            yield Action(Kind.FORWARD if forward else Kind.BACKWARD, target.source, m)
    elif action.kind is Kind.FORWARD:
        yield from (Action(Kind.RECV, e, m) for e in stages.inputs(target))
    elif action.kind is Kind.BACKWARD:
        yield Action(Kind.FORWARD, target, m)
        outputs = (e for e in stages.outputs(target) if e in stages.gradient_edges)
        yield from (Action(Kind.RECV, e.reversed, m) for e in outputs)
    elif action.kind is Kind.REDUCE:
        yield from (Action(Kind.BACKWARD, target, i) for i in range(microbatches))
