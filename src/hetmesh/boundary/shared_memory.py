"""Shared memory: slots to which one process writes messages, and in which another process of its host reads them."""

from __future__ import annotations

import mmap
import os
import threading

import torch
from torch import Tensor

_HEADER_BYTES = 64  # of a slot: whether it is in use, in a cache line that the message does not share
_MIN_SLOT_BYTES = mmap.ALLOCATIONGRANULARITY


class _Slot:
    """A part of a file in memory, as this process has mapped it: a flag and a message."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self.start = start
        memory = mmap.mmap(fd, size, offset=start)
        self._flag = memoryview(memory)[:8].cast("q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._barrier = threading.Lock()

    @property
    def in_use(self) -> bool:
        """Whether a message lies there that its reader has not released."""
        return bool(self._flag[0])

    def mark(self, *, in_use: bool) -> None:
        """Change the flag. The locks are barriers: no processor sees the change before what was read or written."""
        with self._barrier:
            pass
        with self._barrier:
            self._flag[0] = in_use

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._bytes[_HEADER_BYTES : _HEADER_BYTES + numel * dtype.itemsize].view(dtype)


class SlotWriter:
    """The slots that this process writes and one other reads. No two readers share slots: first mapping a page costs as
    much as the copy, and what a reader has mapped serves again.

    Attributes:
        fd: of the file; None before the first message.
        bytes: size of the file; pages that were never written to take no memory.
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        self.bytes = 0
        self._slots: dict[int, list[_Slot]] = {}  # by size

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """A free slot: where it starts in the file, and where to write a message of `numel` elements. Raises OSError:
        no memory is left for it, or no file descriptor."""
        size = _slot_bytes(numel, dtype)
        # Always the first that is free: its pages exist, and it is likelier than others to be in a cache.
        slot = next((slot for slot in self._slots.get(size, ()) if not slot.in_use), None) or self._grow(size)
        slot.mark(in_use=True)
        return slot.start, slot.tensor(numel, dtype)

    def _grow(self, size: int) -> _Slot:
        if self.fd is None:
            self.fd = os.memfd_create("hetmesh", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.bytes + size)  # pages are made when they are written to
        slot = _Slot(self.fd, self.bytes, size)
        self.bytes += size
        self._slots.setdefault(size, []).append(slot)
        return slot

    @property
    def unread(self) -> int:
        """Messages that have not been released yet."""
        return sum(slot.in_use for slots in self._slots.values() for slot in slots)

    def close(self) -> None:
        """Give back the file; memory that the other process has mapped stays until it is done."""
        if self.fd is not None:
            os.close(self.fd)
        self._slots.clear()


class SlotReader:
    """The slots that this process reads and the process of id `process` writes."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._slots: dict[int, _Slot] = {}  # by start

    def read(self, fd: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The message where it lies; `release` must follow. Raises OSError where the other process has ended."""
        if start not in self._slots:
            opened_fd = os.open(descriptor_path(self._process, fd), os.O_RDWR | os.O_CLOEXEC)
            try:
                self._slots[start] = _Slot(opened_fd, start, _slot_bytes(numel, dtype))
            finally:
                os.close(opened_fd)
        return self._slots[start].tensor(numel, dtype)

    def release(self, start: int) -> None:
        """The message has been read: its slot may be written to again."""
        self._slots[start].mark(in_use=False)


def descriptor_path(process: int, fd: int) -> str:
    """Where another process finds what `process` has opened as `fd`."""
    return f"/proc/{process}/fd/{fd}"


def _slot_bytes(numel: int, dtype: torch.dtype) -> int:
    return max(1 << (_HEADER_BYTES + numel * dtype.itemsize - 1).bit_length(), _MIN_SLOT_BYTES)
