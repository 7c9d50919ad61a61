"""Parameters that nobody trains: written once by each rank, and linked into every later checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hetmesh.checkpoint.save_plan import SavedEntry
from hetmesh.checkpoint.writing import WrittenPart, write_file

Fingerprint = tuple[int, ...]

_WORDS = 1 << 17  # of 8 bytes, at a time: what fits into a cache
# Odd, with as many ones as zeros: 2 ** 64 over the golden ratio, and the factors of splitmix64. All is modulo 2 ** 64.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def frozen_names(root: nn.Module) -> set[str]:
    """Names of the parameters of `root` that are not trained."""
    return {name for name, p in root.named_parameters(remove_duplicate=False) if not p.requires_grad}


class FrozenFile:
    """A rank's file of what does not change from one checkpoint of a run to the next.

    A hard link makes it part of each, so that every folder is complete, may be copied or deleted by itself, and the
    bytes are on the disk once. A file system without links gets a copy in each. Values that have changed all the same
    (a moving average, a codebook) are written again: their fingerprint shows it, since torch counts no changes of
    DTensors nor through `.data`.
    """

    def __init__(self) -> None:
        self._last: tuple[Path, Fingerprint, list[WrittenPart]] | None = None

    def link(self, partial: Path, final: Path, name: str, fingerprint: Fingerprint) -> list[WrittenPart]:
        """Make the file `name` in the folder `partial`, which will be called `final`, a link to that of an earlier
        checkpoint with the same `fingerprint`. Returns what is in it; nothing where it must be written."""
        if self._last is None or self._last[1] != fingerprint:
            return []
        try:
            os.link(self._last[0], partial / name)
        except OSError:  # the checkpoint is gone, or the file system knows no links
            return []
        self._last = (final / name, *self._last[1:])
        return self._last[2]

    def write(
        self, partial: Path, final: Path, name: str, entries: Sequence[SavedEntry], fingerprint: Fingerprint
    ) -> list[WrittenPart]:
        """Write `entries`, whose fingerprint is `fingerprint`, to it. Raises OSError."""
        if not entries:
            return []
        written = write_file(partial / name, entries)
        self._last = (final / name, fingerprint, written)
        return written


@torch.no_grad()
def fingerprint_of(entries: Sequence[SavedEntry]) -> Fingerprint:
    """A number of 64 bits for the bytes of each tensor: the sum of its words, each mixed with its place, much as
    splitmix64 mixes its state (Steele, Lea and Flood, 2014). Computed on the tensors' device, several times faster than
    a copy; the host waits for it."""
    tensors = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
    places: dict[torch.device, Tensor] = {}
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device not in places:
            places[tensor.device] = torch.arange(_WORDS, device=tensor.device).mul_(_STEP)
        sums.setdefault(tensor.device, []).append(_sum(tensor, places[tensor.device]))
    found = {device: iter(torch.stack(each).tolist()) for device, each in sums.items()}
    return tuple(next(found[tensor.device]) for tensor in tensors)


def _sum(tensor: Tensor, places: Tensor) -> Tensor:
    """The sum of the mixed words of a tensor: int64, a scalar where it lies."""
    total = places.new_zeros(())
    for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(8 * _WORDS):
        if piece.numel() % 8 or piece.storage_offset() % 8:  # no whole words, or none that begin where words may
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8))
        words = piece.view(torch.int64)
        mixed = (words ^ places[: len(words)]).mul_(_FIRST)
        mixed = mixed.bitwise_xor_(mixed >> 32).mul_(_SECOND)
        total = total * _STEP + mixed.bitwise_xor_(mixed >> 32).sum()
    return total
