"""Writing a checkpoint with DCP's writer: files with checksums of what goes into them, a file of untrained parameters,
which is linked into every later checkpoint, what each rank wrote, and DCP's index of all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hetmesh._torch_compat import storage_prefix
from hetmesh.records.checksums import METADATA, Checksum, SavedPart, Sum, read_metadata


def write_file(folder: Path, prefix: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Write `items` of a plan to the disk, in a file of `folder` whose name begins with `prefix`; none without items.
    Returns where they are, with their checksums (XXH3) in place of what DCP did with the bytes. Raises OSError."""
    if not items:
        return []
    summed = Checksum()
    # Copied one by one: DCP copies ahead on this thread's current stream, which is that of the first device.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0, _extensions=[summed])
    try:
        written = writer.write_data(SavePlan(list(items), storage_data=storage_prefix(prefix)), planner).wait()
    except RuntimeError as error:
        raise error.__context__ or error from None  # torch.save does not say why
    for result, hashed in zip(written, summed.hashes, strict=True):
        result.storage_data.transform_descriptors = [hashed.hexdigest()]
    return written


class FrozenFile:
    """A rank's file of what does not change from one checkpoint of a run to the next.

    A hard link makes it part of each, so that every folder is complete and the bytes are on the disk once. A file
    system without links gets a copy in each. Values that have changed all the same (a moving average, a codebook) are
    written again: their fingerprint shows it.
    """

    def __init__(self) -> None:
        self._last: tuple[Path, list[str], list[WriteResult]] | None = None

    def link(self, partial: Path, final: Path, fingerprint: list[str]) -> list[WriteResult]:
        """Link that of an earlier checkpoint with the same `fingerprint` into the folder `partial`, which will be
        called `final`. Returns what is in it; nothing where it must be written."""
        if self._last is None or self._last[1] != fingerprint:
            return []
        file, _, written = self._last
        try:
            os.link(file, partial / file.name)
        except OSError:  # the checkpoint is gone, or the file system knows no links
            return []
        self._last = (final / file.name, fingerprint, written)
        return written

    def keep(self, final: Path, fingerprint: list[str], written: list[WriteResult]) -> None:
        """Let later checkpoints link what was written to the folder that will be called `final`."""
        if written:
            self._last = (final / written[0].storage_data.relative_path, fingerprint, written)


def fingerprint_of(tensors: Iterable[Tensor]) -> list[str]:
    """XXH3 of the bytes of each tensor, one after another in memory of the host."""
    hosts = (tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    return [xxhash.xxh3_64_hexdigest(host.numpy().data) for host in hosts]


def report_name(rank: int) -> str:
    """DCP's index of what a rank has written; it exists once all of that is on the disk."""
    return f"__{rank}{METADATA}"


def write_report(folder: Path, rank: int, written: list[WriteResult]) -> None:
    """Write the report of `rank`, whole or not at all. Raises OSError."""
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    writer.finish(Metadata({}), [written])


def write_index(folder: Path, metadata: Metadata, ranks: int) -> dict[SavedPart, Sum]:
    """Write DCP's index of what all ranks have reported, and remove the reports; returns the checksums. Raises OSError,
    CheckpointError."""
    written, sums = list[WriteResult](), dict[SavedPart, Sum]()
    for name in map(report_name, range(ranks)):
        for index, info in read_metadata(folder, name).storage_data.items():
            part = SavedPart(info.relative_path, info.offset, info.length, index.fqn)
            (sums[part],) = info.transform_descriptors
            info.transform_descriptors = None  # nothing was done with the bytes
            written.append(WriteResult(index, info.length, info))
        (folder / name).unlink()
    FileSystemWriter(folder).finish(replace(metadata), [written])
    return sums
