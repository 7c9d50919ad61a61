"""Executes schedules on real processes."""

from hetmesh.runtime.batches_ahead import LoadBatch
from hetmesh.runtime.live_bytes import LiveBytes, SpanBytes
from hetmesh.runtime.runtime import Recording, Reducer, Runtime
from hetmesh.runtime.step_runner import Loss, Observe, edge_name
