"""Validation: a schedule that passes can be executed in order by every rank without waiting for itself."""

from __future__ import annotations

from collections import Counter

from hetmesh.errors import GraphError
from hetmesh.schedule.actions import Schedule, dependencies, required


def validate(schedule: Schedule) -> Schedule:
    """Return `schedule` if every required action comes exactly once and after all it depends on.

    A total order in which dependencies hold cannot deadlock while receives match sends: each rank's next action waits
    only for actions that come earlier in the order.

    Raises:
        GraphError: names the first action that is missing, superfluous, repeated or too early.
    """
    wanted = set(required(schedule.stages, schedule.microbatches, schedule.training))
    count = Counter(schedule.actions)
    for action in schedule.actions:
        if action not in wanted:
            raise GraphError(f"schedule: action {action} does not belong to this step")
        if count[action] > 1:
            raise GraphError(f"schedule: action {action} comes {count[action]} times")
    missing = sorted(str(action) for action in wanted - set(count))
    if missing:
        raise GraphError(f"schedule: missing actions {missing[:8]}")
    done = set()
    for action in schedule.actions:
        for before in dependencies(action, schedule.stages, schedule.microbatches):
            if before not in done:
                raise GraphError(f"schedule: {action} comes before {before}, which it needs")
        done.add(action)
    return schedule
