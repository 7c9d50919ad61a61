"""Balancing: samples to lanes and microbatches, as pure functions of metadata. One file per policy."""

from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.plan_batch import POLICIES, plan_batch
from hetmesh.balance.routes import EdgeLayouts, Runs, boundary_layouts, edge_layouts, route_runs, row_space

__all__ = [
    "POLICIES",
    "BatchPlan",
    "EdgeLayouts",
    "Lanes",
    "Runs",
    "boundary_layouts",
    "edge_layouts",
    "plan_batch",
    "route_runs",
    "row_space",
]
