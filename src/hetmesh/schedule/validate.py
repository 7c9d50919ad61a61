"""Validation: a schedule that passes can be executed in order by every rank without waiting for itself."""

from __future__ import annotations

from collections import Counter

from hetmesh.errors import ScheduleError
from hetmesh.schedule.held import peaks_in_flight
from hetmesh.schedule.schedule import Schedule, dependencies, required


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule` if every required action comes exactly once, after all it depends on, and within the caps.

    A total order in which dependencies hold cannot deadlock, whatever the relative speed of ranks: each rank's next
    action waits only for actions that come earlier in the order, and of all unfinished actions the earliest can run.
    Messages between two ranks have the same order on both, because both take part in a SEND at its place in the order.

    Raises:
        ScheduleError: names the first action that is missing, superfluous, repeated, too early or beyond a cap.
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
    most = peaks_in_flight(schedule.actions, stages, routes, schedule.training, split)
    for stage, cap in schedule.in_flight.items():
        if most[stage] > cap:
            raise ScheduleError(f"schedule: stage {stage} holds {most[stage]} microbatches at a time, its cap is {cap}")
    return schedule
