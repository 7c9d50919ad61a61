"""Schedules: a total order of actions per step. One file per policy; `validate` is what they all pass."""

from hetmesh.schedule.actions import Action, Kind, Schedule, dependencies, required
from hetmesh.schedule.sequential import sequential
from hetmesh.schedule.validate import validate

POLICIES = {"sequential": sequential}
"""Policies by their name in `[parallelism] pipeline_parallel_schedule`."""

__all__ = ["POLICIES", "Action", "Kind", "Schedule", "dependencies", "required", "sequential", "validate"]
