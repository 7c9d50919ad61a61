"""Balancing: samples to lanes and microbatches, as pure functions of metadata. One file per policy."""

from hetmesh.balance.batch_plan import BatchPlan, Lanes
from hetmesh.balance.in_order import in_order

__all__ = ["BatchPlan", "Lanes", "in_order"]
