"""What stages hold: a microbatch from its forward to the end of its backward, or until the last forward has read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.schedule import Action, Kind, Schedule, backward_kinds


def readers(stage: Stage, microbatch: int, stages: StageGraph, routes: Routes) -> tuple[tuple[Stage, int], ...]:
    """The consumers of a microbatch, once each: one may read several outputs."""
    some = routes.out_of(stages.outputs(stage), microbatch)
    return tuple(dict.fromkeys((route.edge.destination, route.destination) for route in some))


def holding(
    actions: Iterable[Action],
    stages: StageGraph,
    routes: Routes,
    training: bool = True,
    split: frozenset[Stage] = frozenset(),
) -> Iterator[tuple[Stage, int, int]]:
    """(stage, microbatch, 1) where a stage begins to hold a microbatch, and (stage, microbatch, -1) where it lets go.

    A stage without a backward lets go of a microbatch when the last forward that reads it is over; what nobody reads it
    does not hold at all.
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
            for each in dict.fromkeys(producers):
                if each in waiting:
                    waiting[each] -= 1
                    if not waiting[each]:
                        del waiting[each]
                        yield (*each, -1)
        elif action.kind is last[target]:
            yield target, m, -1


def peaks_in_flight(
    actions: Iterable[Action],
    stages: StageGraph,
    routes: Routes,
    training: bool = True,
    split: frozenset[Stage] = frozenset(),
) -> dict[Stage, int]:
    """Per stage, the most microbatches that it holds at a time."""
    held, most = dict.fromkeys(stages.stages, 0), dict.fromkeys(stages.stages, 0)
    for stage, _, change in holding(actions, stages, routes, training, split):
        held[stage] += change
        most[stage] = max(most[stage], held[stage])
    return most


def peak_in_flight(schedule: Schedule, stage: Stage) -> int:
    """The most microbatches that `stage` holds at a time: see `Schedule.in_flight`."""
    s = schedule
    return peaks_in_flight(s.actions, s.stages, s.routes, s.training, s.split)[stage]
