"""The sequential policy: one microbatch after the other, forward through all stages, then backward through all."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import StageGraph
from hetmesh.schedule.actions import Action, Kind, Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def sequential(stages: StageGraph, microbatches: int, training: bool = True) -> Schedule:
    """A validated schedule that keeps one microbatch in flight; with `training=False` the forwards alone."""
    actions: list[Action] = []
    for m in range(microbatches):
        for stage in stages.stages:
            actions += [Action(Kind.RECV, e, m) for e in stages.inputs(stage)]
            actions.append(Action(Kind.FORWARD, stage, m))
            actions += [Action(Kind.SEND, e, m) for e in stages.outputs(stage)]
        for stage in reversed(stages.stages) if training else ():
            if stage not in stages.backward_stages:
                continue
            outputs = [e for e in stages.outputs(stage) if e in stages.gradient_edges]
            actions += [Action(Kind.RECV, e.reversed, m) for e in outputs]
            actions.append(Action(Kind.BACKWARD, stage, m))
            inputs = [e for e in stages.inputs(stage) if e in stages.gradient_edges]
            actions += [Action(Kind.SEND, e.reversed, m) for e in inputs]
    if training:
        actions += [Action(Kind.REDUCE, s, -1) for s in reversed(stages.stages) if s in stages.backward_stages]
    return validate(Schedule(stages, microbatches, tuple(actions), training))
