"""Checksums of a checkpoint's files: bytes that changed on disk are found, and named, before anything is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import ExtensionRegistry, FileSystemReader, StreamTransformExtension
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from hetmesh.errors import CheckpointError
from hetmesh.files import from_json, read_file

MANIFEST = "checksums.json"
METADATA = ".metadata"  # DCP's index of names, shapes and places in files

Sum = int | str
"""Of bytes: what `xxh3` gives, or, in checkpoints of older versions, their CRC-32 as a number."""


class Checksum(StreamTransformExtension):
    """Sums up the bytes of each value while DCP writes them, and compares them while it reads them, before anything is
    made of them: DCP's hook for whatever is done with them on their way.

    Args:
        expected, part: of the bytes that are read: their checksum, and what they are, in words.

    Attributes:
        hashes: of the values that were written, in their order.
    """

    def __init__(self, expected: Sum = "", part: str = "") -> None:
        self.expected, self.part = expected, part
        self.hashes: list[xxhash.xxh3_64] = []

    @staticmethod
    def registry_name() -> str:
        return "hetmesh.checksum"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/{json.dumps([self.expected, self.part])}"

    @staticmethod
    def from_descriptor(version: str) -> Checksum:
        return Checksum(*json.loads(version))

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        self.hashes.append(xxhash.xxh3_64())
        return cast(IO[bytes], _Tee(output, self.hashes[-1]))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Raises CheckpointError: it has changed; UnpicklingError, BadZipFile: torch.save did not write that."""
        content = io.BytesIO()
        shutil.copyfileobj(input, content)  # piece by piece: an index may claim more bytes than a file has
        compute = zlib.crc32 if isinstance(self.expected, int) else xxhash.xxh3_64_hexdigest
        if compute(content.getbuffer()) != self.expected:
            raise CheckpointError(f"{self.part}, has changed")
        with zipfile.ZipFile(content) as archive:
            if packed := [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]:
                raise pickle.UnpicklingError(f"{packed[0]} in it is packed, which torch.save never does")
        content.seek(0)
        return content


@dataclass(frozen=True)
class _Tee:
    """Writes to `output` what it adds to `hash`."""

    output: IO[bytes]
    hash: xxhash.xxh3_64

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.output.write(data)

    def flush(self) -> None:
        """Only when all is written."""

    def close(self) -> None:
        self.output.close()


class Reader(FileSystemReader):
    """DCP's, of checkpoints that anybody may have written. What it reads is compared with `sums`, the checksums of all
    parts; None: with nothing."""

    def __init__(self, folder: Path, sums: Mapping[SavedPart, Sum] | None = None) -> None:
        extensions = ExtensionRegistry()
        extensions.register(Checksum)
        super().__init__(str(folder), extensions)
        self._sums = sums

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _load_index(Path(self.path, METADATA))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        if self._sums is not None:
            checks = {(part.file, part.offset): Checksum(each, part.text) for part, each in self._sums.items()}
            for info in self.storage_data.values():
                info.transform_descriptors = [checks[info.relative_path, info.offset].get_descriptor()]


def _load_index(file: Path) -> Metadata:
    """DCP's index, which may name nothing but what DCP writes there, and only files of its own folder. (DCP itself
    unpickles it, which runs what it names.) Raises OSError, UnpicklingError or ValueError, and whatever broken pickles
    lead to."""
    found = _Unpickler(io.BytesIO(read_file(file))).load()
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("it is no index of DCP's")
    for name, entry in found.state_dict_metadata.items():
        sized = isinstance(entry, TensorStorageMetadata) and isinstance(entry.size, torch.Size)
        if not sized and not isinstance(entry, BytesStorageMetadata):
            raise ValueError(f"{name} is neither a tensor with a size nor bytes")
    for name in {info.relative_path for info in found.storage_data.values()}:
        if not is_plain_name(name) or (file.with_name(name).exists() and not file.with_name(name).is_file()):
            raise ValueError(f"it names {name!r}, which is no name of a file beside it")
    return found


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes memory for whatever number a file gives an object
    dispatch = pickle._Unpickler.dispatch.copy()
    del dispatch[pickle.BYTEARRAY8[0]]  # the one in Python takes as many bytes as that claims to have

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
    def text(self) -> str:
        """What errors call it."""
        return f"{self.name} in {self.file}, bytes {self.offset} to {self.offset + self.length}"


def read_metadata(folder: Path, name: str = METADATA) -> Metadata:
    """DCP's index of a checkpoint. Raises CheckpointError: there is none, or it is none."""
    try:
        return _load_index(folder / name)
    except Exception as error:  # whatever unpickling makes of a damaged file
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise CheckpointError(f"checkpoint {folder} cannot be read: {name}: {reason}") from error


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
