"""A device that computes nothing: a type of torch's devices with streams, events, random state and autocast, but no
kernels. What its tensors are is `fake_tensors.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from hetmesh._torch_compat import python_device
from hetmesh.attention.flex import FLEX
from hetmesh.boundary.accelerator import Accelerator
from hetmesh.dryrun.fake_autocast import NAME, register
from hetmesh.dryrun.host_waits import HostWaits


class FakeStream:
    """A queue in which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_event(self, event: Any, /) -> None:
        """Nothing is queued."""

    def wait_stream(self, stream: Any, /) -> None:
        """Nothing is queued."""

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """An event, which is reached."""
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Nothing is queued."""
        _module().waited("a stream")

    def query(self) -> bool:
        """Whether all is done."""
        return True


class FakeEvent:
    """An event, which is reached; times between events are 0. Whoever synchronizes with it would wait on a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> FakeEvent:
        """Here."""
        return self

    def wait(self, stream: Any = None) -> None:
        """It is reached."""

    def synchronize(self) -> None:
        """It is reached."""
        _module().waited("an event")

    def query(self) -> bool:
        """Whether it is reached."""
        return True

    def elapsed_time(self, other: Any, /) -> float:
        """Nothing takes time."""
        return 0.0


class FakeModule:
    """What torch and FSDP ask of a `torch.cuda`. The device is there while somebody uses it."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)
        self._waits: HostWaits | None = None

    @contextmanager
    def used(self, waits: HostWaits) -> Iterator[None]:
        """The device is there in the body; `waits` is told where the host would wait for it."""
        before, self._waits = self._waits, waits
        try:
            yield
        finally:
            self._waits = before

    def waited(self, what: str) -> None:
        """The host waits for `what`."""
        if self._waits is not None:
            self._waits.device_to_host(what)

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def is_available(self) -> bool:
        """While it is used."""
        return self._waits is not None

    def current_device(self) -> int:
        """There is one."""
        return 0

    def device_count(self) -> int:
        """There is one, while it is used."""
        return int(self.is_available())

    def set_device(self, device: Any) -> None:
        """There is one."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device(self, device: Any) -> AbstractContextManager[object]:
        """There is one."""
        return FakeStream()

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """The body queues on `stream`."""
        return FakeStream()

    def current_stream(self, device: Any = None) -> FakeStream:
        """Any is like any other."""
        return FakeStream()

    default_stream = current_stream

    def synchronize(self, device: Any = None) -> None:
        """Nothing is queued."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        """A state that means nothing."""
        return self._state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Nothing is drawn."""

    def manual_seed(self, seed: int) -> None:
        """Nothing is drawn."""

    manual_seed_all = manual_seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.bfloat16, torch.float16]


@cache
def _module() -> FakeModule:
    return FakeModule()


@cache
def fake_device() -> torch.device:
    """The device; made once per process."""
    device = python_device(NAME, _module())
    from hetmesh.dryrun.fake_attention import flex_attention_without_values

    register()
    FLEX[NAME] = flex_attention_without_values
    return device


@dataclass(frozen=True)
class FakeAccelerator(Accelerator):
    """The accelerator of a dry run: what is asked of it costs nothing, and it remembers what memory is pinned.

    Attributes:
        draws: whether weights are drawn as if they had values, to see what that takes.
        pinned_memory: storages of the host from which a copy does not hold the host up.
    """

    draws: bool = False
    pinned_memory: WeakSet[torch.UntypedStorage] = field(default_factory=WeakSet)

    @classmethod
    def make(cls, *, draws: bool = False) -> FakeAccelerator:
        """One, on the device of this process."""
        return cls(fake_device(), draws)

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def computes(self) -> bool:
        return self.draws

    @property
    def random_module(self) -> Any:
        return torch.get_device_module(self.device)

    def pinned(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self.pinned_memory.add(copy.untyped_storage())
        return copy

    def empty_pinned(self, like: Tensor) -> Tensor:
        host = torch.empty_like(like, device="cpu")
        self.pinned_memory.add(host.untyped_storage())
        return host

    def used(self, waits: HostWaits) -> AbstractContextManager[None]:
        """The device is there in the body (`FakeModule.used`)."""
        return _module().used(waits)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it lies in pinned memory."""
        return tensor.untyped_storage() in self.pinned_memory

    def stream(self) -> FakeStream:
        return FakeStream()

    def current_stream(self) -> FakeStream:
        return FakeStream()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return FakeStream()

    def event(self, *, timing: bool = False) -> FakeEvent:
        return FakeEvent()

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        """Memory is freed when nobody holds it."""

    def synchronize(self) -> None:
        """Nothing is queued."""
