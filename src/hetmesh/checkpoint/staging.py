"""Copies of what a checkpoint holds, in memory of the host that stays from save to save, so that training can go on."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from hetmesh.boundary.accelerator import Accelerator, Event
from hetmesh.checkpoint.save_plan import SavedEntry


class Staging:
    """Memory for one save at a time, as much as this rank writes; pinned where tensors come from a device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers: dict[MetadataIndex, Tensor] = {}

    @torch.no_grad()
    def copy(self, entries: Sequence[SavedEntry]) -> tuple[list[SavedEntry], Event]:
        """Copies of `entries`, and the event after which those of a device's tensors are there; what the device does
        from here on comes after them, and may change the originals. Copies of an earlier call are overwritten."""
        tensors = [entry for entry in entries if isinstance(entry.value, Tensor)]
        kept = {entry.index: self._buffer(entry) for entry in tensors}
        self._buffers = kept
        targets, sources = list(kept.values()), [entry.value.detach() for entry in tensors]
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        event = self._accelerator.event()
        event.record()
        copied = [SavedEntry(e.index, kept[e.index]) if e.index in kept else e for e in entries]
        return as_bytes(copied), event

    def _buffer(self, entry: SavedEntry) -> Tensor:
        value: Tensor = entry.value
        had = self._buffers.get(entry.index)
        if had is not None and had.shape == value.shape and had.dtype == value.dtype:
            return had
        if value.device.type == "cpu":
            return torch.empty(value.shape, dtype=value.dtype)
        return self._accelerator.empty_pinned(value.detach().contiguous())


def as_bytes(entries: Iterable[SavedEntry]) -> list[SavedEntry]:
    """`entries` with the bytes of those that are no tensors, which may change once training goes on. Equal ones are
    pickled once: options of optimizers are thousands, nearly all alike."""
    known: dict[Any, bytes] = {}
    found = []
    for entry in entries:
        if isinstance(entry.value, Tensor):
            found.append(entry)
            continue
        plain = is_plain(entry.value)
        key = (type(entry.value), repr(entry.value)) if plain else entry.index
        if key not in known:
            stream = io.BytesIO()
            torch.save(entry.value, stream)
            known[key] = stream.getvalue()
        found.append(SavedEntry(entry.index, known[key]))
    return found


def is_plain(value: Any) -> bool:
    """Whether `value` cannot change, and its `repr` tells it from all others of its type."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
