"""Reading a checkpoint by DCP's plan and index: each rank reads its part, in place where possible, and compares every
byte with its checksum on the way. An error on one rank is raised on all."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from hetmesh._processes import no_garbage_collection
from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.checkpoint.save_plan import is_plain, uneven_parts
from hetmesh.errors import CheckpointError
from hetmesh.files import open_file
from hetmesh.records import checksums
from hetmesh.records.checksums import SavedPart

_MIN_BYTES_IN_PLACE = 1 << 16  # of a smaller part, a copy costs less than another read
_HEADER_BYTES = 1 << 12  # that hold the header of torch.save, some 500 bytes
_RECORD = b"archive/data/0"  # what torch.save calls the values of a tensor in its zip file
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then lengths of the name and of the extra field


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds: DCP's metadata (names, shapes, places in files) and the checksums of the bytes there."""

    metadata: Metadata
    sums: Mapping[SavedPart, checksums.Sum]

    @property
    def saved(self) -> Mapping[str, Any]:
        """DCP's description of tensors and other values, by name."""
        entries: Mapping[str, Any] = self.metadata.state_dict_metadata
        return entries

    @classmethod
    def of(cls, path: Path) -> Index:
        """Of the checkpoint at `path`. Raises CheckpointError: it has changed since it was written, or is missing."""
        sums = checksums.read_manifest(path)
        return cls(checksums.read_metadata(path), sums)


@no_garbage_collection()
def read_index(world: World, path: Path) -> Index:
    """The index of the checkpoint at `path`, compared with its checksum. Collective. Raises CheckpointError: it has
    changed or cannot be read; on every rank."""
    errors, index = list[str](), Index(Metadata({}), {})
    try:
        index = Index.of(path)
    except CheckpointError as error:
        errors = [str(error)]
    _raise_first(world, path, errors)
    return index


@no_garbage_collection()
def read_into(world: World, path: Path, state: dict[str, Any], index: Index) -> None:
    """Read the values of `state` from the checkpoint at `path`, tensors in place, and compare checksums. Collective.
    Raises CheckpointError: it cannot be read, or has changed; tensors may have been overwritten then. On every rank."""
    try:
        errors = read_alone(path, state, index, f"rank {world.rank}: ")
    except CheckpointError as error:
        errors = [str(error)]
    _raise_first(world, path, errors)


def read_alone(path: Path, state: dict[str, Any], index: Index, rank: str = "") -> list[str]:
    """`read_into` on one rank, without others. It does what `dcp.load` does on each rank; what that does between ranks,
    sending all plans to one of them, changes none. Returns what has changed since it was written, in words. Raises
    CheckpointError: it cannot be read."""
    reader, planner = CheckedReader(path, index.sums), Planner()
    try:
        planner.set_up_planner(state, index.metadata, is_coordinator=False)
        reader.set_up_storage_reader(index.metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except Exception as error:  # whatever reading makes of files that are no checkpoint's
        raise CheckpointError(f"checkpoint {path} cannot be read: {rank}{type(error).__name__}: {error}") from error
    return [f"checkpoint {path} is damaged: {text}" for text in reader.damage]


class Planner(DefaultLoadPlanner):
    """DCP's, with the parts that ranks hold as FSDP2 cuts them (`uneven_parts`). It unpickles plain values only (DCP's
    runs whatever code they name), and equal ones once: options of optimizers are thousands, nearly all alike."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        plan, held, metadata = super().create_local_plan(), uneven_parts(self.state_dict), self.metadata
        items = [item for item in plan.items if item.dest_index.fqn not in held]
        if metadata is not None:
            for name, part in held.items():
                saved = metadata.state_dict_metadata[name]
                if all(part.sizes) and isinstance(saved, TensorStorageMetadata):
                    items += create_read_items_for_chunk_list(name, saved, [part])
        return replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into its place."""
        content = value.getvalue()
        if content in self._known:
            unpickled = self._known[content]
        else:
            unpickled = unpacked(value)
            if is_plain(unpickled):
                self._known[content] = unpickled
        *path, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for part in path:
            place = place[part]
        place[last] = unpickled


class CheckedReader(checksums.Reader):
    """DCP's FileSystemReader, which reads each byte once and compares it with its checksum: what `writing.write_file`
    wrote goes into the tensors without a copy or torch.load. Tensors may be overwritten with bytes that have changed.

    Args:
        sums: of the parts of the checkpoint. Where these are of an older version (CRC-32), tensors are unpickled: they
            need not be contiguous in their files.

    Attributes:
        damage: what has changed since it was written, in words.
    """

    def __init__(self, folder: Path, sums: Mapping[SavedPart, checksums.Sum]) -> None:
        super().__init__(folder)
        self._contiguous = all(isinstance(checksum, str) for checksum in sums.values())
        self._sums = {(part.file, part.offset): (part, checksum) for part, checksum in sums.items()}
        self._buffer = bytearray()
        self._saved: dict[str, Any] = {}
        self.damage: list[str] = []

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._saved = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in by_file.items():
            try:
                with open_file(os.path.join(self.path, file)) as stream:
                    for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                        self._read(stream, item, planner)
            except FileNotFoundError:
                self.damage.append(f"{file} is missing")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        part, expected = self._sums[info.relative_path, info.offset]
        comparison = checksums.Comparison(expected)
        if item.type == LoadItemType.BYTE_IO:
            content = self._content(stream, part, comparison)
            if self._intact(part, comparison):
                planner.load_bytes(item, io.BytesIO(content))
            return
        entry = self._saved[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(c for c in entry.chunks if item.storage_index.offset in (None, c.offsets))
        target, dtype = planner.resolve_tensor(item).detach(), entry.properties.dtype
        in_place = self._contiguous and item.lengths == chunk.sizes and target.dtype == dtype
        in_place = in_place and target.device.type == "cpu" and target.is_contiguous()
        if not (in_place and self._read_in_place(stream, part, comparison, target)):
            content = self._content(stream, part, comparison)
            if self._intact(part, comparison):
                values = self._values(content, chunk.sizes, dtype)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    values = values.narrow(dim, start, length)
                target.copy_(values)
        planner.commit_tensor(item, target)

    def _read_in_place(
        self, stream: BinaryIO, part: SavedPart, comparison: checksums.Comparison, target: Tensor
    ) -> bool:
        """Read all values of a part into `target`; False where that is slower or impossible, and nothing was done."""
        if part.length < _MIN_BYTES_IN_PLACE or not _has_bytes(stream, part.offset + part.length):
            return False
        beginning = self._content(stream, part, length=_HEADER_BYTES)
        start = _start(self._buffer, _HEADER_BYTES)
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
        self._intact(part, comparison)
        return True

    def _content(
        self, stream: BinaryIO, part: SavedPart, comparison: checksums.Comparison | None = None, length: int = 1 << 62
    ) -> memoryview:
        """The first `length` bytes of a part, in memory that the next call overwrites."""
        length = min(part.length, length)
        content = memoryview(b"")
        if len(self._buffer) >= length or _has_bytes(stream, part.offset + length):
            if len(self._buffer) < length:
                self._buffer = bytearray(length)
            stream.seek(part.offset)
            content = memoryview(self._buffer)[:length]
            content = content[: stream.readinto(content)]  # type: ignore[attr-defined]
        if comparison is not None:
            comparison.update(content)
        return content

    def _intact(self, part: SavedPart, comparison: checksums.Comparison) -> bool:
        equal = comparison.equal()
        if not equal:
            self.damage.append(part.changed)
        return equal

    def _values(self, content: memoryview, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        start = _start(self._buffer, len(content)) if self._contiguous else None
        numel = math.prod(sizes)
        if start is None or not numel or start + numel * dtype.itemsize > len(content):
            tensor: Tensor = unpacked(io.BytesIO(content))
            return tensor
        return torch.frombuffer(content, dtype=dtype, count=numel, offset=start).view(sizes)


def _has_bytes(stream: BinaryIO, end: int) -> bool:
    """Whether a file has `end` bytes: no memory for what is not there."""
    return end <= stream.seek(0, os.SEEK_END)


def unpacked(content: io.BytesIO) -> Any:
    """What torch.save wrote, on the CPU; it takes no more memory than it has bytes. Raises UnpicklingError, BadZipFile,
    and whatever torch.load makes of other bytes."""
    with zipfile.ZipFile(content) as archive:
        if packed := [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]:
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
    start: int = name + name_length + extra_length
    return start if signature == b"PK\x03\x04" and name_length == len(_RECORD) else None


def first_of(errors: Sequence[str], shown: int) -> str:
    """The first `shown` of `errors`, and how many more there are."""
    return "; ".join(errors[:shown]) + (f" (and {len(errors) - shown} more)" if len(errors) > shown else "")


def _raise_first(world: World, path: Path, errors: list[str]) -> None:
    """The first error that any rank has, as one error on every rank; how many more there are."""
    by_rank = gather_objects(errors, world, f"verifying {path}")
    texts = list(dict.fromkeys(text for texts in by_rank for text in texts))
    if texts:
        raise CheckpointError(first_of(texts, 1))
