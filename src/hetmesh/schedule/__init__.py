"""Schedules: a total order of actions per step; `validate` is what all policies pass."""

from collections.abc import Callable

from hetmesh.schedule.bubble_fill import bubble_fill
from hetmesh.schedule.interleaved import interleaved
from hetmesh.schedule.one_f_one_b import one_f_one_b, zero_bubble
from hetmesh.schedule.schedule import (
    Action,
    Kind,
    PolicyOptions,
    Schedule,
    dependencies,
    holding,
    peaks_in_flight,
    validate,
)
from hetmesh.schedule.sequential import sequential
from hetmesh.schedule.three_phase import three_phase
from hetmesh.schedule.windows import ahead, uses_collectives, windows

Policy = Callable[..., Schedule]
"""`policy(stages, microbatches, training=True, options=PolicyOptions())`: cached, validated, equal on every rank.
`microbatches` are the `Routes` of a BatchPlan, or a number: as many in every module, each fed by its own number."""

POLICIES: dict[str, Policy] = {
    "sequential": sequential,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "three_phase": three_phase,
    "bubble_fill": bubble_fill,
}
"""Policies by their name in `[parallelism] pipeline_parallel_schedule`."""
