"""Accelerator: what the device of a process can do that a host's memory cannot, as one value that the World takes.

Streams, events, pinned memory and random state come from here and from nowhere else, so that another device (a fake
one, on which a dry run counts) is a subclass handed to `World` or `init`, not a patch.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_MIN_KEPT_ELEMENTS = 2**15  # less comes from the heap of the process at no cost
_MAX_UNUSED_BYTES = 2**28


class Stream(Protocol):
    """What follows of a queue of a device: of `torch.Stream`."""

    def wait_event(self, event: Any, /) -> None:
        """What is queued from here on begins when `event` has been reached."""


class Event(Protocol):
    """A point in a queue: of `torch.Event`."""

    def record(self) -> object:
        """Put it at the end of the current queue."""

    def synchronize(self) -> None:
        """Let the host wait until it is reached."""

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from here to `other`; both must have been reached."""


class _Now:
    """An event of a device that does everything at once: it is reached when it is recorded."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Now) -> float:
        return 1e3 * (other.at - self.at)


@dataclass(frozen=True)
class Accelerator:
    """The CPU: what is asked of it is done before the call returns. `device`: where this process computes."""

    device: torch.device = _CPU

    @property
    def asynchronous(self) -> bool:
        """Whether the host only queues work, and must not wait for it inside a step."""
        return False

    @property
    def computes(self) -> bool:
        """Whether its tensors have values; if not, weights need neither be drawn nor read."""
        return True

    @property
    def random_module(self) -> Any:
        """Whose `get_rng_state(device)`, `set_rng_state(state, device)` and `manual_seed` are the device's; None where
        the device has no random state beside the CPU's."""
        return None

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor`, a host's, in memory from which the device copies while the host goes on."""
        return tensor

    def empty_pinned(self, like: Tensor) -> Tensor:
        """Memory of a host with the sizes of `like`, a device's, to which the device copies while the host goes on."""
        return torch.empty_like(like, device="cpu")

    def stream(self, *, high_priority: bool = False) -> Stream | None:
        """A new queue beside the current one; None where there are none. `high_priority`: where both have kernels that
        wait for processors, its kernels get them before those of other queues, the current one too."""
        return None

    def current_stream(self) -> Stream | None:
        """The queue that operations go to."""
        return None

    def on(self, stream: Stream | None) -> AbstractContextManager[object]:
        """Operations of the body go to `stream`."""
        return nullcontext()

    def event(self, *, timing: bool = False) -> Event:
        """An event, not yet recorded. `timing`: whether `elapsed_time` will be asked."""
        return _Now()

    def zero(self) -> tuple[Event, float]:
        """An event, recorded now with nothing queued before it, and `time.perf_counter` then."""
        event = self.event(timing=True)
        self.synchronize()
        event.record()
        return event, event.at if isinstance(event, _Now) else time.perf_counter()

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        """`stream`, another one than that in which `tensor` was made, reads it: its memory is not taken for anything
        else before what is queued there now is done."""

    def synchronize(self) -> None:
        """Let the host wait for all that is queued; never inside a step."""


@dataclass(frozen=True)
class Cuda(Accelerator):
    """A CUDA device."""

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def random_module(self) -> Any:
        return torch.get_device_module(self.device)

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def empty_pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=not like.is_sparse)

    def stream(self, *, high_priority: bool = False) -> Stream:
        return torch.Stream(self.device, priority=-int(high_priority))  # the lowest is 0, as that of the default stream

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else stream  # type: ignore[return-value]

    def event(self, *, timing: bool = False) -> Event:
        return torch.Event(self.device, enable_timing=timing)

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        if tensor.device.type == self.device.type:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


class Buffers:
    """Memory for packed messages, used again and again: flat tensors on one device, by dtype and power of two.

    The kernel clears fresh memory page by page, which costs as much as packing. CUDA's allocator keeps memory itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least `numel` elements, of any content."""
        if numel < _MIN_KEPT_ELEMENTS or self.device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=self.device)
        size = 1 << (numel - 1).bit_length()
        free = self._free.get((dtype, size))
        if not free:
            with torch.inference_mode(False):  # what is made inside cannot be written to outside
                return torch.empty(size, dtype=dtype)
        buffer = free.pop()
        self._bytes -= buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Hand back what `take` returned and nobody uses any more."""
        if (
            buffer.numel() < _MIN_KEPT_ELEMENTS
            or self.device.type != "cpu"
            or self._bytes + buffer.nbytes > _MAX_UNUSED_BYTES
        ):
            return
        self._bytes += buffer.nbytes
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)
