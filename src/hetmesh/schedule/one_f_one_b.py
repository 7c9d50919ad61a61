"""1F1B over the module DAG (Narayanan et al., "PipeDream", arXiv 1806.03377; its flush variant as in Megatron-LM), and
zero bubble: the same with the backward split into the part that others wait for and the part that can fill gaps."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.list_schedule import capped_stages, caps_by_distance, list_schedule, nominal
from hetmesh.schedule.schedule import DEFAULT, NO_STAGES, PolicyOptions, Schedule, schedule_of
from hetmesh.schedule.sequential import one_by_one


@lru_cache(maxsize=64)
def one_f_one_b(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in which every stage, once warm, alternates one forward and one backward.

    A stage warms up by its distance to the LLM, as heterogeneous pipelines do (NVIDIA's Megatron-LM for multimodal
    models, MIMO): by the distance from the source, encoders of unequal depth would be misaligned. A stage without a
    backward runs as far ahead, and no further.
    """
    return by_caps(stages, Routes.of(stages, microbatches), training, validated=options.validated)


@lru_cache(maxsize=64)
def zero_bubble(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule with as many microbatches in flight as 1F1B, and gaps filled with gradients of weights.

    Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), ZB-H1, over the module DAG. Only stages that
    need the gradients of both an input and parameters are split: a frozen stage has nothing to defer, and nobody waits
    for a stage without anything trainable before it. Nor are those that cannot be split
    (`ModuleSpec.splits_backward`).
    """
    split = stages.splittable_stages if training else NO_STAGES
    return by_caps(stages, Routes.of(stages, microbatches), training, split, options.validated)


def by_caps(
    stages: StageGraph,
    routes: Routes,
    training: bool,
    split: frozenset[Stage] = NO_STAGES,
    validated: bool = True,
) -> Schedule:
    """The schedule of stages that each obey `Capped` with `caps_by_distance`."""
    steps = one_by_one(stages, routes, training)
    caps = caps_by_distance(stages, routes, steps)
    # of two that could start at once, the one nearer to the LLM
    groups = capped_stages(reversed(stages.stages), stages, routes, steps, caps, split)
    order = list_schedule(stages, routes, groups, nominal(stages, routes, split), split)
    return schedule_of(order, stages, routes, training, caps, split, validated)
