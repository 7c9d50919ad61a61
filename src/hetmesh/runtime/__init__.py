"""The runtime executes schedules on real processes.

runtime.py   what is built once per run
step.py      what one rank keeps while it runs one schedule
backward.py  the backward of a stage, whole or in two parts
"""

from hetmesh.runtime.runtime import Recording, Reducer, Runtime
from hetmesh.runtime.step import LoadBatch, Loss, Observe, edge_name

__all__ = ["LoadBatch", "Loss", "Observe", "Recording", "Reducer", "Runtime", "edge_name"]
