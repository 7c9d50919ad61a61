"""A device that computes nothing: a type of torch's devices with streams, events, random state and autocast, but no
kernels; the accelerator and the backend of a dry run. Its tensors are those of `fake_tensors.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hetmesh._torch_compat import python_device
from hetmesh.attention.flex import FLEX
from hetmesh.boundary.accelerator import Cuda
from hetmesh.boundary.backend import Nccl, PeerBuffer, Posted
from hetmesh.dryrun.fake_kernels import NAME, flex_attention_without_values, register
from hetmesh.dryrun.host_waits import HostWaits


def _nothing(*_: Any, **__: Any) -> None:
    """Nothing is queued, drawn or waited for."""


def _always(*_: Any, **__: Any) -> bool:
    """It is there, and done."""
    return True


class FakeStream:
    """A queue in which nothing waits."""

    __init__ = wait_event = wait_stream = __exit__ = _nothing
    query = _always

    def __enter__(self) -> FakeStream:
        return self

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Counts a wait of the host."""
        _module().waited("a stream")


class FakeEvent:
    """An event, which is reached; times between events are 0. Whoever synchronizes with it would wait on a GPU."""

    __init__ = wait = _nothing
    query = _always

    def record(self, stream: Any = None) -> FakeEvent:
        return self

    def synchronize(self) -> None:
        """Counts a wait of the host."""
        _module().waited("an event")

    def elapsed_time(self, other: Any, /) -> float:
        return 0.0


class FakeModule:
    """What torch and FSDP ask of a `torch.cuda`: one device, which is there while somebody uses it."""

    Stream, Event = FakeStream, FakeEvent
    is_initialized = _always

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)
        self._waits: HostWaits | None = None

    @contextmanager
    def used(self, waits: HostWaits) -> Iterator[None]:
        """The device is there in the body, where `waits` counts the waits of the host."""
        before, self._waits = self._waits, waits
        try:
            yield
        finally:
            self._waits = before

    def waited(self, what: str) -> None:
        """Counts that the host waits for `what`."""
        if self._waits is not None:
            self._waits.device_to_host(what)

    def is_available(self) -> bool:
        return self._waits is not None

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        """One, while it is used."""
        return int(self.is_available())

    def current_stream(self, device: Any = None) -> FakeStream:
        """Any is like any other."""
        return FakeStream()

    device = stream = default_stream = current_stream
    set_device = synchronize = set_rng_state = manual_seed = manual_seed_all = _nothing

    def get_rng_state(self, device: Any = None) -> Tensor:
        """A state without meaning, `[16]` of uint8."""
        return self._state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def _module() -> FakeModule:
    return FakeModule()


@cache
def fake_device() -> torch.device:
    """The device; made once per process."""
    device = python_device(NAME, _module())
    register()
    FLEX[NAME] = flex_attention_without_values
    return device


@dataclass(frozen=True)
class FakeAccelerator(Cuda):
    """The accelerator of a dry run: what is asked of it costs nothing, and it remembers what memory is pinned.

    Attributes:
        draws: whether weights are drawn as if they had values, to see what that takes.
        pinned_memory: storages of the host from which a copy does not hold the host up.
    """

    draws: bool = False
    pinned_memory: WeakSet[torch.UntypedStorage] = field(default_factory=WeakSet)

    @classmethod
    def make(cls, *, draws: bool = False) -> FakeAccelerator:
        """The accelerator of this process's fake device."""
        return cls(fake_device(), draws)

    @property
    def computes(self) -> bool:
        return self.draws

    def pinned(self, tensor: Tensor) -> Tensor:
        return self._in_pinned_memory(tensor.clone())

    def empty_pinned(self, like: Tensor) -> Tensor:
        return self._in_pinned_memory(torch.empty_like(like, device="cpu"))

    def _in_pinned_memory(self, tensor: Tensor) -> Tensor:
        self.pinned_memory.add(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self.pinned_memory

    def used(self, waits: HostWaits) -> AbstractContextManager[None]:
        return _module().used(waits)

    def stream(self, *, high_priority: bool = False) -> FakeStream:
        return FakeStream()

    current_stream = stream

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return FakeStream()

    def event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent()

    used_by = synchronize = _nothing


@dataclass
class Arrived:
    """Messages that have arrived; `timed_waits` counts waits with a timeout, which on NCCL block the host."""

    timed_waits: int = 0
    is_completed = _always

    def wait(self, timeout: timedelta | None = None, /) -> object:
        """Nothing to wait for."""
        self.timed_waits += timeout is not None
        return True


@dataclass(frozen=True)
class FakeBackend(Nccl):
    """The backend of a dry run: messages as NCCL's, to ranks that do not exist: received is the planned shape."""

    device_type: str = NAME
    arrived: Arrived = field(default_factory=Arrived)

    connect = _nothing

    def post(
        self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int, group: Any, what: object
    ) -> tuple[Posted, Posted]:
        """Packs what is sent; see `Backend.post`."""
        count = len(receives) + sum(1 for _ in sends)
        return ([(None, self.arrived)] if count else []), []

    def all_to_all(self, *arguments: Any) -> Arrived:
        """As in `Backend.all_to_all`; the fake group's handle would never be over, nor its buffers be let go of."""
        super().all_to_all(*arguments)
        return self.arrived
