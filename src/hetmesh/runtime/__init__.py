"""The runtime executes schedules on real processes.

runtime.py     what is built once per run
step.py        what one rank keeps while it runs one schedule
backward.py    the backward of a stage, whole or in two parts
live_bytes.py  bytes of tensors that are alive, operation by operation
"""

from hetmesh.runtime.batches_ahead import LoadBatch
from hetmesh.runtime.live_bytes import LiveBytes, SpanBytes
from hetmesh.runtime.recording import Recording
from hetmesh.runtime.runtime import Reducer, Runtime
from hetmesh.runtime.step import Loss, Observe, edge_name

__all__ = [
    "LiveBytes",
    "LoadBatch",
    "Loss",
    "Observe",
    "Recording",
    "Reducer",
    "Runtime",
    "SpanBytes",
    "edge_name",
]
