"""Zero bubble: the backward split into the part that others wait for and the part that can fill gaps."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Routes, StageGraph
from hetmesh.schedule.one_f_one_b import by_caps
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.schedule import Schedule, splittable


@lru_cache(maxsize=64)
def zero_bubble(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule with as many microbatches in flight as 1F1B, and gaps filled with gradients of weights.

    Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), ZB-H1, over the module DAG. Only stages that
    need the gradients of both an input and parameters are split: a frozen stage has nothing to defer, and nobody waits
    for a stage without anything trainable before it.
    """
    return by_caps(stages, Routes.of(stages, microbatches), training, splittable(stages) if training else frozenset())
