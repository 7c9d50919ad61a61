"""Batches that the stages of a rank read, on the device one microbatch before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from hetmesh.attention.packed_rows import with_tensors
from hetmesh.boundary.accelerator import Accelerator, Event, Stream
from hetmesh.graph import Stage

LoadBatch = Callable[[Stage, int], Mapping[str, Tensor]]
"""(stage, microbatch) -> the stage's own inputs on this rank's lane, on the CPU."""

Forward = tuple[Stage, int]
"""A stage and a microbatch."""

_Copied = tuple[Mapping[str, Any], Event]
"""A batch on its way to the device, and when it is there."""


class BatchesAhead:
    """Batches in the order of the forwards that read them. On an asynchronous accelerator the next batch is loaded and
    copied, from pinned memory and on a separate stream, while the device still computes the one before; elsewhere a
    batch is loaded when it is needed.

    Args:
        load: called once per forward.
        forwards: of this rank, in order.
        stream: for the copies, the same in every step: memory belongs to a stream.
    """

    def __init__(
        self, load: LoadBatch, accelerator: Accelerator, forwards: Iterable[Forward], stream: Stream | None
    ) -> None:
        self.load, self.accelerator = load, accelerator
        self._waiting: deque[Forward] = deque(forwards if accelerator.asynchronous else ())
        self._copied: dict[Forward, _Copied | Exception] = {}
        self._stream = stream

    def take(self, stage: Stage, microbatch: int) -> Mapping[str, Any]:
        """The batch of a forward, its tensors on the device. Raises Exception: whatever loading it has raised, in the
        action that needs it and not in the one before."""
        forward = (stage, microbatch)
        if not self.accelerator.asynchronous:
            return self._on_device(self.load(*forward))
        if forward not in self._copied:
            self._waiting.remove(forward)
            self._copied[forward] = self._copy(forward)
        copied = self._copied.pop(forward)
        if isinstance(copied, Exception):
            raise copied
        batch, copy_over = copied
        if (current := self.accelerator.current_stream()) is not None:
            current.wait_event(copy_over)
        for value in batch.values():
            if isinstance(value, Tensor):
                self.accelerator.used_by(value, current)
        return batch

    def prepare(self) -> None:
        """Start loading the next batch. Call it when what reads the one before has been queued."""
        if self._waiting and not self._copied:
            forward = self._waiting.popleft()
            try:
                self._copied[forward] = self._copy(forward)
            except Exception as error:  # it belongs to the action that needs the batch
                self._copied[forward] = error

    def _copy(self, forward: Forward) -> _Copied:
        batch = self.load(*forward)
        over = self.accelerator.event()
        with self.accelerator.on(self._stream):
            # torch keeps pinned memory until copies from it are over.
            copied = self._on_device(batch)
            over.record()
        return copied, over

    def _on_device(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return with_tensors(batch, {key: self._to_device(value) for key, value in batch.items()})

    def _to_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = self.accelerator.pinned(value) if value.device.type == "cpu" else value
        return value.to(self.accelerator.device, non_blocking=True)
