"""Writing a checkpoint: files with checksums of what goes into them, what each rank wrote, and DCP's index of all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
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
            self.error = error  # torch.save raises one of its own, which does not say why
            raise

    def flush(self) -> None:
        pass  # once, when all is written


def write_file(path: Path, entries: Iterable[SavedEntry]) -> list[WrittenPart]:
    """Write tensors, and the bytes of all else, into a file and to the disk, in DCP's format: each as torch.save does.
    Raises OSError."""
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
