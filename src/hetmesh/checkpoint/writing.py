"""Writing a checkpoint: files with checksums of what goes into them, what each rank wrote, and DCP's index of all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from hetmesh._torch_compat import storage_info, without_zip_checksums
from hetmesh.checkpoint.save_plan import SavedEntry
from hetmesh.files import from_json, read_file
from hetmesh.records.checksums import SavedPart, Sum


@dataclass(frozen=True)
class WrittenPart:
    """Where an entry is: which one, the bytes of which file, and their checksum."""

    index: MetadataIndex
    part: SavedPart
    checksum: Sum


class _Summed:
    """A stream that counts and sums up what passes through it."""

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
            self.error = error  # torch.save raises one of its own, which does not say why
            raise

    def flush(self) -> None:
        pass  # once, when all is written


def write_file(path: Path, entries: Iterable[SavedEntry]) -> list[WrittenPart]:
    """Write `entries` into a file, to the disk, in the format of DCP: each as `torch.save` does.

    Args:
        entries: tensors, and the bytes of all else.

    Raises:
        OSError: it cannot be written.
    """
    found = []
    with open(path, "wb") as raw, without_zip_checksums():
        stream = _Summed(raw)
        try:
            for entry in entries:
                offset = raw.tell()
                stream.begin()
                if isinstance(entry.value, Tensor):
                    _save_tensor(entry.value, stream)
                else:
                    stream.write(entry.value)
                part = SavedPart(path.name, offset, stream.length, entry.index.fqn)
                found.append(WrittenPart(entry.index, part, stream.hash.hexdigest()))
        except Exception as error:
            raise stream.error or error from error
        raw.flush()
        os.fsync(raw.fileno())
    return found


def _save_tensor(tensor: Tensor, stream: _Summed) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # of a view, only what is seen is saved
    torch.save(tensor, cast(IO[bytes], stream))  # all that it needs of one


def report_name(rank: int) -> str:
    """The file in which a rank says what it has written; it is there when all of that is on the disk."""
    return f"__{rank}.written"


def write_report(folder: Path, rank: int, written: Iterable[WrittenPart]) -> None:
    """Say what `rank` has written in `folder`: all of it or nothing. Raises OSError."""
    lines = []
    for each in written:
        index, part = each.index, each.part
        offset = None if index.offset is None else list(index.offset)
        lines.append([index.fqn, offset, index.index, part.file, part.offset, part.length, each.checksum])
    temporary = folder / (report_name(rank) + ".part")
    temporary.write_text(json.dumps(lines), encoding="utf-8")
    os.replace(temporary, folder / report_name(rank))


def take_report(folder: Path, rank: int) -> list[WrittenPart]:
    """What `rank` said; the file is removed. Raises OSError."""
    file = folder / report_name(rank)
    found = [
        WrittenPart(MetadataIndex(name, offset, number), SavedPart(where, start, length, name), crc)
        for name, offset, number, where, start, length, crc in from_json(read_file(file))
    ]
    file.unlink()
    return found


def write_index(folder: Path, metadata: Metadata, written: Iterable[WrittenPart]) -> None:
    """Write DCP's index of what all ranks have written. Raises OSError."""
    results = [
        WriteResult(w.index, w.part.length, storage_info(w.part.file, w.part.offset, w.part.length)) for w in written
    ]
    FileSystemWriter(str(folder)).finish(replace(metadata), [results])
