"""Slots of memory that one process writes and others on its host read where they lie."""

from __future__ import annotations

import mmap
import os
import threading
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER = mmap.ALLOCATIONGRANULARITY  # of a slab: one flag per slot
_SMALLEST, _SLAB = 2**12, 2**21  # bytes: of a slot; of all slots of a slab, where one is not larger
_IN_USE, _FREE = 1, 0


class Slot(NamedTuple):
    """Where a message lies, as its writer tells its reader.

    Attributes:
        file: the writer's open file.
        slab: where its slab begins there.
        place: in the slab.
    """

    file: int
    slab: int
    place: int


class Slab:
    """Slots of equal size, one behind the other in a file that lies in memory."""

    def __init__(self, file: int, start: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        memory = mmap.mmap(file, slab_bytes(slot_bytes), offset=start)
        self._flags = memoryview(memory)[:_HEADER].cast("q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._barrier = threading.Lock()

    def tensor(self, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The first `numel` elements of a slot."""
        start = _HEADER + place * self.slot_bytes
        return self._bytes[start : start + numel * dtype.itemsize].view(dtype)

    def mark(self, place: int, state: int) -> None:
        """Say whether a slot is in use. What was read or written before comes before, on any processor."""
        with self._barrier:
            pass
        with self._barrier:
            self._flags[place] = state

    def in_use(self, place: int) -> bool:
        """Whether its reader has not marked it as free yet."""
        return self._flags[place] != _FREE


class Outgoing:
    """The slots that this process writes and one other reads. Each reader has its own: what it has mapped once serves
    again, and the pages of memory that nobody has touched yet cost as much as the copy."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._size = 0
        self._slabs: dict[int, Slab] = {}
        self._by_size: dict[int, list[Slot]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> tuple[Slot, Tensor]:
        """A free slot, and where to write a message of `numel` elements."""
        size = _slot_bytes(numel * dtype.itemsize)
        slots = self._by_size.setdefault(size, [])
        # Always the first that is free: its pages are there, and likelier than others in a cache.
        slot = next((each for each in slots if not self._slabs[each.slab].in_use(each.place)), None)
        if slot is None:
            slot = self._grow(size)
        slab = self._slabs[slot.slab]
        slab.mark(slot.place, _IN_USE)
        return slot, slab.tensor(slot.place, numel, dtype)

    def _grow(self, size: int) -> Slot:
        if self._file is None:
            self._file = os.memfd_create("hetmesh", os.MFD_CLOEXEC)
        start, length = self._size, slab_bytes(size)
        self._size += length
        os.ftruncate(self._file, self._size)  # pages come when they are written to
        self._slabs[start] = Slab(self._file, start, size)
        added = [Slot(self._file, start, place) for place in range(_slots(size))]
        self._by_size[size] += added
        return added[0]

    @property
    def unread(self) -> int:
        """Messages that have not been released yet."""
        return sum(self._slabs[s.slab].in_use(s.place) for slots in self._by_size.values() for s in slots)

    @property
    def bytes(self) -> int:
        """Size of the file; pages that were never written to take no memory."""
        return self._size

    def close(self) -> None:
        """Give back the file; memory that the other process has mapped stays until it is done."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self._slabs.clear()
        self._by_size.clear()


class Incoming:
    """The slots of one other process that this one reads.

    Args:
        process: its id.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._slabs: dict[int, Slab] = {}

    def read(self, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        """The message where it lies; `release` must follow."""
        if slot.slab not in self._slabs:
            file = os.open(path(self._process, slot.file), os.O_RDWR | os.O_CLOEXEC)
            try:
                self._slabs[slot.slab] = Slab(file, slot.slab, _slot_bytes(numel * dtype.itemsize))
            finally:
                os.close(file)
        return self._slabs[slot.slab].tensor(slot.place, numel, dtype)

    def release(self, slot: Slot) -> None:
        """The message has been read: its slot may be written to again."""
        self._slabs[slot.slab].mark(slot.place, _FREE)


def slab_bytes(slot_bytes: int) -> int:
    """Bytes of a slab with slots of that size."""
    return _HEADER + _slots(slot_bytes) * slot_bytes


def _slots(slot_bytes: int) -> int:
    return max(_SLAB // slot_bytes, 1)


def path(process: int, file: int) -> str:
    """Where another process finds an open file of this one."""
    return f"/proc/{process}/fd/{file}"


def _slot_bytes(size: int) -> int:
    return max(1 << (size - 1).bit_length(), _SMALLEST)
