"""Writing a checkpoint: files with checksums of what goes into them, a file of untrained parameters, which is linked
into every later checkpoint, what each rank wrote, and DCP's index of all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from hetmesh._torch_compat import storage_info, without_zip_checksums
from hetmesh.checkpoint.save_plan import SavedEntry
from hetmesh.files import from_json, read_file
from hetmesh.records.checksums import SavedPart, Sum

Fingerprint = tuple[int, ...]

_WORDS = 1 << 17  # of 8 bytes, at a time: what fits into a cache
# Odd, with as many ones as zeros: 2 ** 64 over the golden ratio, and the factors of splitmix64. All is modulo 2 ** 64.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class WrittenPart:
    """An entry that is written: DCP's index of it, the bytes of a file, and their checksum."""

    index: MetadataIndex
    part: SavedPart
    checksum: Sum


class _Summed:
    """A stream that counts the bytes that pass through it and computes their checksum."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.length, self.hash = raw, 0, xxhash.xxh3_64()
        self.error: OSError | None = None

    def begin(self) -> None:
        self.length = 0
        self.hash.reset()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.length += len(data)
        try:
            return int(self.raw.write(data))
        except OSError as error:
            self.error = error  # torch.save raises another, without the reason
            raise

    def flush(self) -> None:
        pass  # once, when all is written


def write_file(path: Path, entries: Iterable[SavedEntry]) -> list[WrittenPart]:
    """Write tensors, and bytes of all else, to the disk in DCP's format: each as torch.save does. Raises OSError."""
    written = []
    with open(path, "wb") as raw, without_zip_checksums():
        stream = _Summed(raw)
        try:
            for entry in entries:
                offset = raw.tell()
                stream.begin()
                if isinstance(entry.value, Tensor):
                    tensor = entry.value.detach().cpu().contiguous()
                    if tensor.untyped_storage().nbytes() != tensor.nbytes:
                        tensor = tensor.clone()  # of a view, only what is seen is saved
                    torch.save(tensor, cast(IO[bytes], stream))
                else:
                    stream.write(entry.value)
                part = SavedPart(path.name, offset, stream.length, entry.index.fqn)
                written.append(WrittenPart(entry.index, part, stream.hash.hexdigest()))
        except Exception as error:
            raise stream.error or error from error
        raw.flush()
        os.fsync(raw.fileno())
    return written


def frozen_names(root: nn.Module) -> set[str]:
    """Names of the parameters of `root` that are not trained."""
    return {name for name, p in root.named_parameters(remove_duplicate=False) if not p.requires_grad}


class FrozenFile:
    """A rank's file of what does not change from one checkpoint of a run to the next.

    A hard link makes it part of each, so that every folder is complete and the bytes are on the disk once. A file
    system without links gets a copy in each. Values that have changed all the same (a moving average, a codebook) are
    written again: their fingerprint shows it.
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
    numbers = {device: iter(torch.stack(of_device).tolist()) for device, of_device in sums.items()}
    return tuple(next(numbers[tensor.device]) for tensor in tensors)


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


def report_name(rank: int) -> str:
    """The file that lists what a rank has written; it exists once all of that is on the disk."""
    return f"__{rank}.written"


def write_report(folder: Path, rank: int, written: Iterable[WrittenPart]) -> None:
    """Write the report of `rank`, whole or not at all. Raises OSError."""
    lines = [
        [w.index.fqn, w.index.offset and list(w.index.offset), w.index.index, *astuple(w.part)[:3], w.checksum]
        for w in written
    ]
    temporary = folder / (report_name(rank) + ".part")
    temporary.write_text(json.dumps(lines), encoding="utf-8")
    os.replace(temporary, folder / report_name(rank))


def take_report(folder: Path, rank: int) -> list[WrittenPart]:
    """Read the report of `rank` and remove the file. Raises OSError."""
    file = folder / report_name(rank)
    written = [
        WrittenPart(MetadataIndex(name, offset, number), SavedPart(where, start, length, name), checksum)
        for name, offset, number, where, start, length, checksum in from_json(read_file(file))
    ]
    file.unlink()
    return written


def write_index(folder: Path, metadata: Metadata, written: Iterable[WrittenPart]) -> None:
    """Write DCP's index of what all ranks have written. Raises OSError."""
    results = [
        WriteResult(w.index, w.part.length, storage_info(w.part.file, w.part.offset, w.part.length)) for w in written
    ]
    FileSystemWriter(str(folder)).finish(replace(metadata), [results])
