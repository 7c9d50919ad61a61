"""Balancing: samples to lanes and microbatches, as pure functions of metadata. One file per policy."""

from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.plan_batch import POLICIES, plan_batch
from hetmesh.balance.routes import EdgeLayouts, boundary_layouts, edge_layouts, row_space

__all__ = [
    "POLICIES",
    "BatchPlan",
    "EdgeLayouts",
    "Lanes",
    "boundary_layouts",
    "edge_layouts",
    "plan_batch",
    "row_space",
]
