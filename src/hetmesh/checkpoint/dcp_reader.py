"""DCP's reader of files, which reads each byte once, into the tensors where it can, and sums it up on the way: new
memory, copies and unpickling cost more than reading itself."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hetmesh.files import open_file
from hetmesh.records import checksums
from hetmesh.records.checksums import SavedPart

_LARGE = 1 << 16  # bytes of a part from which on a copy costs more than another read
_BEGINNING = 1 << 12  # bytes read to find where the values begin: after some 500
_RECORD = b"archive/data/0"  # what torch.save calls the values of a tensor in its zip file
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then lengths of the name and of the extra field


class PlainReader(checksums.Reader):
    """Reads what `writing.write_file` has written, and compares it with its checksums on the way; like
    `checksums.Reader` otherwise. Values whose bytes have changed may have been read into tensors, and nowhere else.

    Args:
        sums: of the parts of the checkpoint. Where these are of an older version (CRC-32), tensors are unpickled: they
            need not be contiguous in their files.

    Attributes:
        wrong: what has changed since it was written, in words.
    """

    def __init__(self, folder: Path, sums: Mapping[SavedPart, checksums.Sum]) -> None:
        super().__init__(folder)
        self._plain = all(isinstance(each, str) for each in sums.values())
        self._sums = {(part.file, part.offset): (part, each) for part, each in sums.items()}
        self._buffer = bytearray()
        self._saved: dict[str, Any] = {}
        self.wrong: list[str] = []

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As DCP's."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._saved = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As DCP's."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in by_file.items():
            try:
                with open_file(os.path.join(self.path, file)) as stream:
                    for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                        self._read(stream, item, planner)
            except FileNotFoundError:
                self.wrong.append(f"{file} is missing")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        part, expected = self._sums[info.relative_path, info.offset]
        comparison = checksums.Comparison(expected)
        if item.type == LoadItemType.BYTE_IO:
            content = self._content(stream, part)
            comparison.update(content)
            if self._as_written(part, comparison):
                planner.load_bytes(item, io.BytesIO(content))
            return
        entry = self._saved[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(c for c in entry.chunks if item.storage_index.offset in (None, c.offsets))
        target, dtype = planner.resolve_tensor(item).detach(), entry.properties.dtype
        in_place = self._plain and item.lengths == chunk.sizes and target.dtype == dtype and _is_plain(target)
        if not (in_place and self._read_in_place(stream, part, comparison, target)):
            content = self._content(stream, part)
            comparison.update(content)
            if self._as_written(part, comparison):
                values = self._values(content, chunk.sizes, dtype)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    values = values.narrow(dim, start, length)
                target.copy_(values)
        planner.commit_tensor(item, target)

    def _read_in_place(
        self, stream: BinaryIO, part: SavedPart, comparison: checksums.Comparison, target: Tensor
    ) -> bool:
        """Read all values of a part into `target` without a copy between; False where that is not worth it or not
        possible, and nothing has been done."""
        if part.length < _LARGE or not _holds(stream, part.offset + part.length):
            return False
        beginning = self._content(stream, part, _BEGINNING)
        start = _start(self._buffer, _BEGINNING)
        if start is None or start + target.nbytes > part.length:
            return False
        comparison.update(beginning[:start])
        stream.seek(part.offset + start)
        values = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(values), checksums.CHUNK):  # summed up while in the cache
            piece = values[begin : begin + checksums.CHUNK]
            if stream.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise EOFError(f"{part.file} ends within {part.name}")
            comparison.update(piece)
        comparison.update(memoryview(stream.read(part.length - start - target.nbytes)))
        self._as_written(part, comparison)
        return True

    def _content(self, stream: BinaryIO, part: SavedPart, most: int | None = None) -> memoryview:
        """The bytes of a part, or the first `most`, in memory that the next call overwrites."""
        length = part.length if most is None else min(part.length, most)
        if len(self._buffer) < length:
            if not _holds(stream, part.offset + length):
                return memoryview(b"")
            self._buffer = bytearray(length)
        content = memoryview(self._buffer)[:length]
        stream.seek(part.offset)
        return content[: stream.readinto(content)]  # type: ignore[attr-defined]

    def _as_written(self, part: SavedPart, comparison: checksums.Comparison) -> bool:
        equal = comparison.equal()
        if not equal:
            self.wrong.append(part.changed)
        return equal

    def _values(self, content: memoryview, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        start = _start(self._buffer, len(content)) if self._plain else None
        numel = math.prod(sizes)
        if start is None or not numel or start + numel * dtype.itemsize > len(content):
            found: Tensor = unpacked(io.BytesIO(content))
            return found
        return torch.frombuffer(content, dtype=dtype, count=numel, offset=start).view(sizes)


def _holds(stream: BinaryIO, end: int) -> bool:
    """Whether a file has so many bytes: no memory for what is not there."""
    return end <= stream.seek(0, os.SEEK_END)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def unpacked(content: io.BytesIO) -> Any:
    """What torch.save wrote, on the CPU; it takes no more memory than it has bytes.

    Raises:
        UnpicklingError, BadZipFile, and whatever torch.load makes of other bytes.
    """
    with zipfile.ZipFile(content) as archive:
        if packed := [each.filename for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]:
            raise pickle.UnpicklingError(f"{packed[0]} in it is packed, which torch.save never does")
    content.seek(0)
    return torch.load(content, map_location="cpu", weights_only=True)


def _start(content: bytearray, length: int) -> int | None:
    """Where the values begin in what torch.save wrote; None where that is not found."""
    name = content.find(_RECORD, 0, min(length, 1 << 16))
    header = name - _LOCAL_HEADER.size
    if header < 0:
        return None
    signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(content, header)
    found: int = name + name_length + extra_length
    return found if signature == b"PK\x03\x04" and name_length == len(_RECORD) else None
