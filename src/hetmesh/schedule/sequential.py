"""The sequential policy: one microbatch after the other, forward through all stages, then backward through all."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import StageGraph
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.order import with_messages
from hetmesh.schedule.schedule import Action, Kind, Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def sequential(
    stages: StageGraph, microbatches: int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule that keeps one microbatch in flight; with `training=False` the forwards alone."""
    order: list[Action] = []
    for m in range(microbatches):
        order += [Action(Kind.FORWARD, stage, m) for stage in stages.stages]
        if training:
            order += [Action(Kind.BACKWARD, s, m) for s in reversed(stages.stages) if s in stages.backward_stages]
    actions = list(with_messages(order, stages, frozenset()))
    if training:
        actions += [Action(Kind.REDUCE, s, -1) for s in reversed(stages.stages) if s in stages.trainable_stages]
    return validate(Schedule(stages, microbatches, tuple(actions), training))
