"""Balancing: samples to lanes and microbatches, as pure functions of metadata. One file per policy."""

from hetmesh.balance.assign import assign
from hetmesh.balance.assignment import Assignment, Spread, spread
from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.from_graph import BalanceOptions, batch_loads, batch_plan_of, graph_slots
from hetmesh.balance.largest import largest_batches
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.pipeline import Score, pipeline_score
from hetmesh.balance.plan_batch import plan_batch
from hetmesh.balance.policies import DEFERRING, POLICIES
from hetmesh.balance.routes import EdgeLayouts, Runs, boundary_layouts, edge_layouts, route_runs, row_space

__all__ = [
    "DEFERRING",
    "POLICIES",
    "Assignment",
    "BalanceOptions",
    "BatchLoads",
    "BatchPlan",
    "EdgeLayouts",
    "Lanes",
    "Runs",
    "Score",
    "Slots",
    "Spread",
    "assign",
    "batch_loads",
    "batch_plan_of",
    "boundary_layouts",
    "edge_layouts",
    "graph_slots",
    "largest_batches",
    "pipeline_score",
    "plan_batch",
    "route_runs",
    "row_space",
    "spread",
]
