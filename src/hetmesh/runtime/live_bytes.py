"""LiveBytes: bytes of tensors that are alive, counted operation by operation, whatever the device or its allocator.

A torch dispatch mode sees every operation after autograd, so also those of backwards, optimizers and collectives. What
an operation allocates and frees by itself (a kernel's workspace) it does not see, nor a framework's own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hetmesh._torch_compat import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves
from hetmesh.parallel import local_part


@dataclass(frozen=True, slots=True)
class SpanBytes:
    """What was alive during a span.

    Attributes:
        label: what the span was called; in a step, an Action.
        before, after: bytes at its beginning and end.
        peak: the most in between.
    """

    label: object
    before: int
    peak: int
    after: int


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the bytes of storages that operations of this thread make, and of given tensors.

    A storage counts once, however many views it has, from the operation that makes it until it is freed. One that
    is resized, as FSDP does with what it gathers, counts with its current size. Memory that
    torch has not allocated (a mapped file, an array, what ranks of one host share to pass messages) is not counted.

    Args:
        existing: tensors that are alive already; of a DTensor its local part counts.
        device: the type of the device whose memory is counted.

    Attributes:
        live: bytes alive now.
        peak: the most that `live` has been, since `restart` if that was called.
        spans: what `span` measured, in order.
    """

    def __init__(self, existing: Iterable[Tensor] = (), device: str = "cpu") -> None:
        super().__init__()
        self.device, self.live, self.peak = device, 0, 0
        self.spans: list[SpanBytes] = []
        self._sizes: dict[int, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}
        self._resize: Callable[..., Any] | None = None
        for tensor in existing:
            self._count(local_part(tensor))

    def restart(self) -> None:
        """Forget the peak and the spans."""
        self.peak = self.live
        self.spans.clear()

    @contextmanager
    def span(self, label: object) -> Iterator[None]:
        before, most = self.live, self.peak
        self.peak = before
        try:
            yield
        finally:
            self.spans.append(SpanBytes(label, before, self.peak, self.live))
            self.peak = max(self.peak, most)

    def __enter__(self) -> Self:
        theirs = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = theirs(storage, size)
            if storage.device.type == self.device or id(storage) in self._known:
                self._count_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor's own operations come here, one by one, on local tensors
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    fake: FakeTensorMode | None = None
    """Whose tensors are alive, where the device is a fake one. Those of other modes, by which DTensor works out shapes,
    have the device and the size of the whole, and no memory."""

    def _count(self, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self.fake:
            return
        device = getattr(tensor, "fake_device", None) or tensor.device  # asking a fake tensor is an operation too
        if device.type == self.device:
            self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        if not (storage.resizable() or id(storage) in self._known):
            return  # what torch has not allocated
        key, size = id(storage), storage.nbytes()
        if key not in self._known:  # torch keeps the Python object of a storage for as long as the storage lives
            self._known[key] = weakref.ref(storage, partial(self._gone, key))
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, _: Any) -> None:
        self.live -= self._sizes.pop(key, 0)
        del self._known[key]
