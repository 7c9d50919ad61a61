"""The runtime executes schedules on real processes."""

from hetmesh.runtime.runtime import LoadBatch, Loss, Observe, Runtime

__all__ = ["LoadBatch", "Loss", "Observe", "Runtime"]
