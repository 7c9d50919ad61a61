"""The rules by which stages choose what comes next; policies put them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetmesh.graph import Stage, StageGraph
from hetmesh.schedule.schedule import Action, Kind, backward_kinds


class Capped:
    """One stage that prefers backwards to forwards and holds at most `cap` microbatches at a time: 1F1B.

    With a split backward the part that others wait for comes first, then a forward, and the weights' part where
    nothing else can start: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), schedule ZB-H1.

    Args:
        microbatches: those to run, in order.
        cap: None for no limit.
        forwards, backwards: which half of the work to propose.
    """

    def __init__(
        self,
        stage: Stage,
        stages: StageGraph,
        microbatches: Sequence[int],
        cap: int | None,
        *,
        split: frozenset[Stage] = frozenset(),
        forwards: bool = True,
        backwards: bool = True,
    ) -> None:
        self.stage, self.microbatches, self.cap = stage, microbatches, cap
        kinds = backward_kinds(stage, stages, split) if backwards else ()
        self.order = (*kinds[:1], *([Kind.FORWARD] if forwards else []), *kinds[1:])
        self.done = dict.fromkeys(self.order, 0)
        self.last = kinds[-1] if kinds else None
        self.consumers = [edge.destination for edge in stages.outputs(stage)]
        self.consumed = dict.fromkeys(self.consumers, 0)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.stage,)

    def proposals(self) -> Iterator[Action]:
        for kind in self.order:
            i = self.done[kind]
            if i < len(self.microbatches) and (kind is not Kind.FORWARD or not self._full()):
                yield Action(kind, self.stage, self.microbatches[i])

    def _full(self) -> bool:
        if self.cap is None:
            return False
        if self.last is not None:
            over = self.done[self.last]
        else:
            over = min(self.consumed.values(), default=self.done[Kind.FORWARD])
        return self.done[Kind.FORWARD] - over >= self.cap

    def started(self, action: Action) -> None:
        self.done[action.kind] += 1

    def finished(self, action: Action) -> None:
        if action.kind is Kind.FORWARD and action.target in self.consumed and isinstance(action.target, Stage):
            self.consumed[action.target] += 1


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


def caps_by_distance(stages: StageGraph, given: Mapping[Stage, int] | None = None) -> dict[Stage, int]:
    """How many microbatches each stage may hold: one more than its fullest consumer, the sink 1.

    So a stage warms up with as many forwards as it has stages between itself and the *sink*: encoders of unequal depth
    all have their first microbatch ready when the LLM wants it, and none runs further ahead than it must.

    Args:
        given: caps that a policy fixes.
    """
    caps: dict[Stage, int] = {}
    for stage in reversed(stages.stages):
        after = 1 + max((caps[e.destination] for e in stages.outputs(stage)), default=0)
        caps[stage] = (given or {}).get(stage, after)
    return caps
