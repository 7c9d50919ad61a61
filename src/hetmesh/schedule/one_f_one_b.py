"""1F1B over the module DAG (Narayanan et al., "PipeDream", arXiv 1806.03377; its flush variant as in Megatron-LM)."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.groups import Capped, caps_by_distance
from hetmesh.schedule.one_by_one import by_stage, one_by_one
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.order import last_backwards, list_schedule, nominal, with_messages
from hetmesh.schedule.schedule import Kind, Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def one_f_one_b(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in which every stage, once warm, alternates one forward and one backward.

    Warm-up of a stage: its distance to the *sink* (hetero_parallel: encoders of unequal depth would be misaligned by
    their distance from the source). A stage without a backward runs as far ahead, and no further.
    """
    return by_caps(stages, Routes.of(stages, microbatches), training, frozenset())


def by_caps(stages: StageGraph, routes: Routes, training: bool, split: frozenset[Stage]) -> Schedule:
    """The schedule of stages that each obey `Capped` with `caps_by_distance`."""
    steps = one_by_one(stages, routes, training)
    caps = caps_by_distance(stages, routes, steps)
    forwards, backwards = by_stage(steps, Kind.FORWARD), by_stage(steps, Kind.BACKWARD)
    groups = [
        Capped(s, stages, routes, caps[s], forwards=forwards.get(s, ()), backwards=backwards.get(s, ()), split=split)
        for s in reversed(stages.stages)  # of two that could start at once, the one nearer to the sink
    ]
    order = list_schedule(stages, routes, groups, nominal(stages, routes, split), split)
    actions = with_messages(order, stages, routes, split, last_backwards(order, stages, split) if training else ())
    return validate(Schedule(stages, routes, actions, training, split, caps))
