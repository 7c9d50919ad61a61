"""The sequential policy: one microbatch after the other, forward through all stages, then backward through all."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Routes, StageGraph
from hetmesh.schedule.one_by_one import one_by_one
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.order import with_messages
from hetmesh.schedule.schedule import Action, Kind, Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def sequential(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule that keeps one microbatch of the sink in flight, and of other modules those that it needs
    and that still have to feed a later one; with `training=False` the forwards alone."""
    routes = Routes.of(stages, microbatches)
    order = [action for step in one_by_one(stages, routes, training) for action in step]
    actions = list(with_messages(order, stages, routes, frozenset()))
    if training:
        actions += [Action(Kind.REDUCE, s, -1) for s in reversed(stages.stages) if s in stages.trainable_stages]
    return validate(Schedule(stages, routes, tuple(actions), training))
