"""Validation: a schedule that passes can be executed in order by every rank without waiting for itself."""

from __future__ import annotations

from collections import Counter

from hetmesh.errors import GraphError
from hetmesh.graph import Stage
from hetmesh.schedule.schedule import Action, Kind, Schedule, backward_kinds, dependencies, required


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule` if every required action comes exactly once, after all it depends on, and within the caps.

    A total order in which dependencies hold cannot deadlock, whatever the relative speed of ranks: each rank's next
    action waits only for actions that come earlier in the order, and of all unfinished actions the earliest can run.
    Messages between two ranks have the same order on both, because both take part in a SEND at its place in the order.

    Raises:
        GraphError: names the first action that is missing, superfluous, repeated, too early or beyond a cap.
    """
    stages, count, split = schedule.stages, schedule.microbatches, schedule.split
    wanted = set(required(stages, count, schedule.training, split))
    given = Counter(schedule.actions)
    for action in schedule.actions:
        if action not in wanted:
            raise GraphError(f"schedule: action {action} does not belong to this step")
        if given[action] > 1:
            raise GraphError(f"schedule: action {action} comes {given[action]} times")
    missing = sorted(str(action) for action in wanted - set(given))
    if missing:
        raise GraphError(f"schedule: missing actions {missing[:8]}")
    done = set()
    for action in schedule.actions:
        for before in dependencies(action, stages, count, split):
            if before not in done:
                raise GraphError(f"schedule: {action} comes before {before}, which it needs")
        done.add(action)
    for stage, cap in schedule.in_flight.items():
        if (most := peak_in_flight(schedule, stage)) > cap:
            raise GraphError(f"schedule: stage {stage} holds {most} microbatches at a time, its cap is {cap}")
    return schedule


def peak_in_flight(schedule: Schedule, stage: Stage) -> int:
    """The most microbatches that `stage` holds at a time: see `Schedule.in_flight`."""
    held: Counter[int] = Counter()
    most = 0
    for action in schedule.actions:
        if action == Action(Kind.FORWARD, stage, action.microbatch):
            held[action.microbatch] = len(releases(schedule, stage, action.microbatch))
            most = max(most, sum(n > 0 for n in held.values()))
        elif held.get(action.microbatch) and action in releases(schedule, stage, action.microbatch):
            held[action.microbatch] -= 1
    return most


def releases(schedule: Schedule, stage: Stage, microbatch: int) -> tuple[Action, ...]:
    """The actions after all of which `stage` holds nothing of a microbatch any more."""
    kinds = backward_kinds(stage, schedule.stages, schedule.split) if schedule.training else ()
    if kinds:
        return (Action(kinds[-1], stage, microbatch),)
    consumers = dict.fromkeys(e.destination for e in schedule.stages.outputs(stage))  # one may read several outputs
    return tuple(Action(Kind.FORWARD, consumer, microbatch) for consumer in consumers)
