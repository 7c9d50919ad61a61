"""Balancing: samples to lanes and microbatches, as pure functions of metadata."""

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.imbalance import spread
from hetmesh.balance.plan_batch import (
    BalanceOptions,
    batch_loads,
    batch_plan_of,
    graph_slots,
    largest_batches,
    plan_batch,
)
from hetmesh.balance.policies import DEFERRING, POLICIES
from hetmesh.balance.route_layouts import Runs, boundary_layouts, edge_layouts, route_runs, row_space
from hetmesh.balance.run_balancer import assign
from hetmesh.balance.step_lengths import pipeline_score
