"""DCP's reader of files, into memory that is used again: new memory and unpickling cost more than reading itself."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hetmesh.training import checksums

_RECORD = b"archive/data/0"  # what torch.save calls the values of a tensor in its zip file
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then lengths of the name and of the extra field


class PlainReader(checksums.Reader):
    """Reads what `writing.write_file` has written; like `checksums.Reader` otherwise.

    Args:
        plain: whether all tensors are contiguous in their files, as this version writes them. Those of older versions
            are unpickled.
    """

    def __init__(self, folder: Path, plain: bool) -> None:
        super().__init__(folder)
        self._plain = plain
        self._buffer = bytearray()
        self._saved: dict[str, Any] = {}

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
            with self.fs.create_stream(self.fs.concat_path(self.path, file), "rb") as stream:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    self._read(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        if len(self._buffer) < info.length:
            if info.offset + info.length > stream.seek(0, os.SEEK_END):  # no memory for what is not there
                raise EOFError(f"{info.relative_path} ends within {item.storage_index.fqn}")
            self._buffer = bytearray(info.length)
        content = memoryview(self._buffer)[: info.length]
        stream.seek(info.offset)
        if stream.readinto(content) != info.length:
            raise EOFError(f"{info.relative_path} ends within {item.storage_index.fqn}")
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(content))
            return
        values = self._values(item, content)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(values)
        planner.commit_tensor(item, target)

    def _values(self, item: ReadItem, content: memoryview) -> Tensor:
        entry = self._saved[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(c for c in entry.chunks if item.storage_index.offset in (None, c.offsets))
        start = _start(self._buffer, len(content)) if self._plain else None
        numel, dtype = math.prod(chunk.sizes), entry.properties.dtype
        if start is None or not numel or start + numel * dtype.itemsize > len(content):
            found: Tensor = unpacked(io.BytesIO(content))
            return found
        return torch.frombuffer(content, dtype=dtype, count=numel, offset=start).view(chunk.sizes)


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
