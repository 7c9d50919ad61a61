"""1F1B over the module DAG (Narayanan et al., "PipeDream", arXiv 1806.03377; its flush variant as in Megatron-LM)."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Stage, StageGraph
from hetmesh.schedule.groups import Capped, caps_by_distance
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.order import last_backwards, list_schedule, nominal, with_messages
from hetmesh.schedule.schedule import Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def one_f_one_b(
    stages: StageGraph, microbatches: int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in which every stage, once warm, alternates one forward and one backward.

    Warm-up of a stage: its distance to the *sink* (hetero_parallel: encoders of unequal depth would be misaligned by
    their distance from the source). A stage without a backward runs as far ahead, and no further.
    """
    return by_caps(stages, microbatches, training, frozenset())


def by_caps(stages: StageGraph, microbatches: int, training: bool, split: frozenset[Stage]) -> Schedule:
    """The schedule of stages that each obey `Capped` with `caps_by_distance`."""
    caps = caps_by_distance(stages)
    groups = [
        Capped(s, stages, range(microbatches), caps[s], split=split, backwards=training)
        for s in reversed(stages.stages)  # of two that could start at once, the one nearer to the sink
    ]
    order = list_schedule(stages, groups, nominal(stages, split), split)
    actions = with_messages(order, stages, split, last_backwards(order, stages, split) if training else ())
    return validate(Schedule(stages, microbatches, actions, training, split, caps))
