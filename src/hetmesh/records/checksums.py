"""Checksums of a checkpoint's files: bytes that changed on disk are found, and named, before anything is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from hetmesh.errors import CheckpointError
from hetmesh.files import from_json, read_file

MANIFEST = "checksums.json"
METADATA = ".metadata"  # DCP's index of names, shapes and places in files
CHUNK = 1 << 20  # bytes read at once; what fits into a cache is summed up at twice the speed

Sum = int | str
"""Of bytes: what `xxh3` gives, or, in checkpoints of older versions, their CRC-32 as a number."""


class Reader(FileSystemReader):
    """DCP's, of checkpoints that anybody may have written: its index may name nothing but what DCP writes there, and
    only files of its own folder. (DCP itself unpickles it, which runs what it names.)"""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index. Raises OSError, UnpicklingError or ValueError, and whatever broken pickles lead to."""
        found = _Unpickler(io.BytesIO(read_file(Path(self.path, METADATA)))).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError("it is no index of DCP's")
        if not isinstance(found.state_dict_metadata, dict):
            raise ValueError("it lists no tensors")
        for name, entry in found.state_dict_metadata.items():
            if not isinstance(getattr(entry, "size", torch.Size()), torch.Size):
                raise ValueError(f"{name} has no size")
        kinds = {type(entry) for entry in found.state_dict_metadata.values()}
        if not kinds <= {TensorStorageMetadata, BytesStorageMetadata}:
            raise ValueError(f"it describes tensors as {kinds}")
        for index, info in found.storage_data.items():
            if not is_plain_name(info.relative_path):
                raise ValueError(f"{index.fqn} is in {info.relative_path!r}, which is no name of a file beside it")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes memory for whatever number a file gives an object
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # by which Python before 3.11.4 pickles members of an enum
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


def _member(kind: Any, name: str) -> Enum:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it names {name} of {kind}, which no index needs")


_DCP = "torch.distributed.checkpoint.metadata"
_DCP_CLASSES = "Metadata MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING "
_DCP_CLASSES += "TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata"
_NAMES = {
    *((_DCP, name) for name in _DCP_CLASSES.split()),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
}
"""What DCP's index may name: its own classes, and what torch's sizes, dtypes and layouts are pickled as."""


def is_plain_name(name: object) -> bool:
    """Whether it is the name of a file, and no path."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


@dataclass(frozen=True, order=True)
class SavedPart:
    """The bytes of one saved tensor (or a piece of it, or a value) in one file."""

    file: str
    offset: int
    length: int
    name: str

    @property
    def changed(self) -> str:
        """What to say where its bytes are not those that were written."""
        return f"{self.name} in {self.file}, bytes {self.offset} to {self.offset + self.length}, has changed"


def read_metadata(folder: Path) -> Metadata:
    """DCP's index of a checkpoint. Raises CheckpointError: there is none, or it is none."""
    try:
        return Reader(folder).read_metadata()
    except Exception as error:  # whatever unpickling makes of a damaged file
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise CheckpointError(f"checkpoint {folder} cannot be read: {METADATA}: {reason}") from error


class Comparison:
    """Bytes that come in pieces, compared with the checksum of all of them."""

    def __init__(self, expected: Sum) -> None:
        self._expected, self._crc = expected, 0
        self._hash = xxhash.xxh3_64() if isinstance(expected, str) else None

    def update(self, piece: memoryview) -> None:
        if self._hash is None:
            self._crc = zlib.crc32(piece, self._crc)
        else:
            self._hash.update(piece)

    def equal(self) -> bool:
        """Whether the bytes so far are those that were summed up."""
        return self._expected == (self._crc if self._hash is None else self._hash.hexdigest())


def write_manifest(folder: Path, sums: Mapping[SavedPart, Sum]) -> None:
    """Write the checksums of all parts, of the index and of themselves, to the disk."""
    parts = [[*astuple(part), crc] for part, crc in sorted(sums.items())]
    content = {"metadata": zlib.crc32((folder / METADATA).read_bytes()), "parts": parts}
    with open(folder / MANIFEST, "w", encoding="utf-8") as stream:
        json.dump({"checksum": _content_sum(content), **content}, stream)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> dict[SavedPart, Sum]:
    """The checksums of a checkpoint's parts, after looking at those of the manifest and of the index. Raises
    CheckpointError: one of these two files is missing, unreadable or has changed."""
    try:
        content = from_json(_manifest(folder))
        checksum = content.pop("checksum")
        sums = {
            SavedPart(str(file), int(offset), int(length), str(name)): crc if isinstance(crc, str) else int(crc)
            for file, offset, length, name, crc in content["parts"]
        }
        places = (place for part in sums for place in (part.offset, part.length))
        if not all(is_plain_name(part.file) for part in sums) or not all(0 <= place < 2**62 for place in places):
            raise ValueError
        known, intact = content["metadata"], checksum == _content_sum(content)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} is no list of checksums") from error
    if not intact:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} has changed since it was written")
    try:
        metadata = read_file(folder / METADATA)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    if zlib.crc32(metadata) != known:
        raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} has changed since it was written")
    return sums


def manifest_sum(folder: Path) -> str:
    """SHA-256 of a checkpoint's manifest, and so of all that it holds. Raises CheckpointError: it cannot be read."""
    return hashlib.sha256(_manifest(folder)).hexdigest()


def _manifest(folder: Path) -> bytes:
    try:
        return read_file(folder / MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointError(no_manifest(folder)) from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error


def no_manifest(folder: Path) -> str:
    """What to say of a checkpoint without checksums."""
    why = "it was copied in part, or written by an older version, and may not be whole"
    return f"checkpoint {folder} has no {MANIFEST}: {why}"


def _content_sum(content: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
