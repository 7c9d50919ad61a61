"""Actions and schedules: what happens in a step, as a total order that every rank knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from hetmesh.graph import Edge, Stage, StageGraph


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
        split: stages whose backward comes as BACKWARD_INPUT and BACKWARD_WEIGHT; the others' comes as BACKWARD.
        in_flight: stage -> microbatches that it may hold at a time, from their forward to the end of their backward
            (where none comes, to the last forward that reads them). Stages left out hold as many as come.
        recompute: stages whose forward keeps only its inputs and is run again right before the backward.
        offload: stages whose waiting activations are kept in the memory of the host.
    """

    stages: StageGraph
    microbatches: int
    actions: tuple[Action, ...]
    training: bool = True
    split: frozenset[Stage] = frozenset()
    in_flight: Mapping[Stage, int] = field(default_factory=lambda: MappingProxyType({}))
    recompute: frozenset[Stage] = frozenset()
    offload: frozenset[Stage] = frozenset()

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
    stages: StageGraph, microbatches: int, training: bool = True, split: frozenset[Stage] = frozenset()
) -> Iterator[Action]:
    """Every action that a step consists of, in no particular order."""
    for m in range(microbatches):
        yield from (Action(Kind.FORWARD, s, m) for s in stages.stages)
        for e in stages.edges:
            yield from (Action(Kind.SEND, e, m), Action(Kind.RECV, e, m))
            if training and e in stages.gradient_edges:
                yield from (Action(Kind.SEND, e.reversed, m), Action(Kind.RECV, e.reversed, m))
        if training:
            yield from (Action(kind, s, m) for s in stages.stages for kind in backward_kinds(s, stages, split))
    if training:
        yield from (Action(Kind.REDUCE, s, -1) for s in stages.stages if s in stages.trainable_stages)


def dependencies(
    action: Action, stages: StageGraph, microbatches: int, split: frozenset[Stage] = frozenset()
) -> Iterator[Action]:
    """The actions that must come before `action`."""
    m, target, kind = action.microbatch, action.target, action.kind
    if isinstance(target, Edge):
        if kind is Kind.RECV:
            yield Action(Kind.SEND, target, m)
        elif target in stages.edges:
            yield Action(Kind.FORWARD, target.source, m)
        else:
            yield Action(backward_kinds(target.source, stages, split)[0], target.source, m)
    elif kind is Kind.FORWARD:
        yield from (Action(Kind.RECV, e, m) for e in stages.inputs(target))
    elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        yield Action(Kind.FORWARD, target, m)
        outputs = (e for e in stages.outputs(target) if e in stages.gradient_edges)
        yield from (Action(Kind.RECV, e.reversed, m) for e in outputs)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, target, m)
    elif kind is Kind.REDUCE:
        last = backward_kinds(target, stages, split)[-1]
        yield from (Action(last, target, i) for i in range(microbatches))
