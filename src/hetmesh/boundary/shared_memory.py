"""Slots of memory that one process writes and others on its host read where they lie."""

from __future__ import annotations

import mmap
import os
import threading
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER = mmap.PAGESIZE  # of a segment: one flag per slot
_SMALLEST, _SEGMENT = 2**12, 2**21  # bytes: of a slot; of all slots of a segment, where one is not larger
_IN_USE, _FREE = 1, 0


class Slot(NamedTuple):
    """Where a message lies, as its writer tells its reader.

    Attributes:
        segment: counts the segments of the writer.
        file: the writer's open file behind it.
        place: in the segment.
    """

    segment: int
    file: int
    place: int


class Segment:
    """One piece of memory with slots of equal size."""

    def __init__(self, file: int, slot_bytes: int, *, owned: bool) -> None:
        self.file, self.slot_bytes = file, slot_bytes
        self.slots = max(_SEGMENT // slot_bytes, 1)
        if owned:
            os.ftruncate(file, _HEADER + self.slots * slot_bytes)  # pages come when they are written to
        memory = mmap.mmap(file, _HEADER + self.slots * slot_bytes)
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


class Slots:
    """The slots of this process, and those of others as it has met them.

    Args:
        processes: by rank, the process ids of those whose slots are read here.
    """

    def __init__(self, processes: dict[int, int]) -> None:
        self._processes = processes
        self._owned: list[Segment] = []
        self._by_size: dict[int, list[Slot]] = {}
        self._seen: dict[tuple[int, int], Segment] = {}

    def take(self, numel: int, dtype: torch.dtype) -> tuple[Slot, Tensor]:
        """A free slot of this process, and where to write a message of `numel` elements."""
        size = _slot_bytes(numel * dtype.itemsize)
        slots = self._by_size.setdefault(size, [])
        # Always the first that is free: its pages are there, and likelier than others in a cache.
        slot = next((each for each in slots if not self._owned[each.segment].in_use(each.place)), None)
        if slot is None:
            number = len(self._owned)
            new = Segment(os.memfd_create(f"hetmesh-{number}", os.MFD_CLOEXEC), size, owned=True)
            self._owned.append(new)
            added = [Slot(number, new.file, place) for place in range(new.slots)]
            slots += added
            slot = added[0]
        segment = self._owned[slot.segment]
        segment.mark(slot.place, _IN_USE)
        return slot, segment.tensor(slot.place, numel, dtype)

    def read(self, rank: int, slot: Slot, numel: int, dtype: torch.dtype) -> Tensor:
        """The message of `rank` where it lies; `release` must follow."""
        key = (rank, slot.segment)
        if key not in self._seen:
            file = os.open(path(self._processes[rank], slot.file), os.O_RDWR)
            try:
                self._seen[key] = Segment(file, _slot_bytes(numel * dtype.itemsize), owned=False)
            finally:
                os.close(file)
        return self._seen[key].tensor(slot.place, numel, dtype)

    def release(self, rank: int, slot: Slot) -> None:
        """The message has been read: its slot may be written to again."""
        self._seen[rank, slot.segment].mark(slot.place, _FREE)

    @property
    def unread(self) -> int:
        """Messages of this process that nobody has released yet."""
        return sum(segment.in_use(place) for segment in self._owned for place in range(segment.slots))

    def close(self) -> None:
        """Give back the files of this process; memory that others have met stays until they are done."""
        for segment in self._owned:
            os.close(segment.file)
        self._owned.clear()
        self._by_size.clear()
        self._seen.clear()


def path(process: int, file: int) -> str:
    """Where another process finds an open file of this one."""
    return f"/proc/{process}/fd/{file}"


def _slot_bytes(size: int) -> int:
    return max(1 << (size - 1).bit_length(), _SMALLEST)
