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
        """The batch of a forward, its tensors on the device.

        Raises:
            Exception: whatever loading it has raised, in the action that needs it and not in the one before.
        """
        forward = (stage, microbatch)
        if not self.accelerator.asynchronous:
            return self._moved(self.load(*forward))
        if forward not in self._copied:
            self._waiting.remove(forward)
            self._copied[forward] = self._copy(forward)
        copied = self._copied.pop(forward)
        if isinstance(copied, Exception):
            raise copied
        return copied.taken(self.accelerator)

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
            pinned = {k: self.accelerator.pinned(v) if _lies_on_host(v) else v for k, v in batch.items()}
            copied = self._moved(with_tensors(batch, pinned))
            over.record()
        return _Copied(copied, over)

    def _moved(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        device = self.accelerator.device
        on_device = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
        return with_tensors(batch, on_device)


class _Copied:
    """A batch on its way to the device."""

    def __init__(self, batch: Mapping[str, Any], over: Event) -> None:
        self.batch, self.over = batch, over

    def taken(self, accelerator: Accelerator) -> Mapping[str, Any]:
        """The batch, for the current stream."""
        if (current := accelerator.current_stream()) is not None:
            current.wait_event(self.over)
        for value in self.batch.values():
            if isinstance(value, Tensor):
                accelerator.used_by(value, current)
        return self.batch


def _lies_on_host(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
