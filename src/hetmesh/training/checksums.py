"""Checksums of a checkpoint's files: bytes that changed on disk are found, and named, before anything is loaded."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from hetmesh.errors import CheckpointError

MANIFEST = "checksums.json"
METADATA = ".metadata"  # DCP's index of names, shapes and places in files
_CHUNK = 1 << 20  # bytes read at once; what fits into a cache is summed up at twice the speed

Sum = int | str
"""Of bytes: what `xxh3` gives, or, in checkpoints of older versions, their CRC-32 as a number."""


@dataclass(frozen=True, order=True)
class SavedPart:
    """The bytes of one saved tensor (or a piece of it, or a value) in one file."""

    file: str
    offset: int
    length: int
    name: str


def read_metadata(folder: Path) -> Metadata:
    """DCP's index of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is none.
    """
    try:
        return FileSystemReader(str(folder)).read_metadata()
    except Exception as error:  # whatever unpickling makes of a damaged file
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise CheckpointError(f"checkpoint {folder} cannot be read: {METADATA}: {reason}") from error


def share(parts: Sequence[SavedPart], rank: int, size: int) -> list[SavedPart]:
    """The parts that `rank` of `size` verifies: neighbours, about as many bytes on every rank."""
    total, seen, mine = sum(part.length for part in parts), 0, []
    for part in parts:
        middle = seen + part.length // 2
        if min(size * middle // max(total, 1), size - 1) == rank:
            mine.append(part)
        seen += part.length
    return mine


def _unequal(folder: Path, sums: Mapping[SavedPart, Sum]) -> list[SavedPart]:
    """Of the parts of `sums`, in one file, those that are others now, or are not all there.

    Raises:
        OSError: the file cannot be read.
    """
    found, buffer = [], memoryview(bytearray(_CHUNK))  # one for all: new memory costs more than what is summed up in it
    file = next(iter(sums)).file
    with open(folder / file, "rb", buffering=0) as stream:
        for part, expected in sums.items():
            stream.seek(part.offset)
            left, crc, hashed = part.length, 0, xxhash.xxh3_64()
            while left and (count := stream.readinto(buffer[: min(left, _CHUNK)])):
                left -= count
                if isinstance(expected, str):
                    hashed.update(buffer[:count])
                else:
                    crc = zlib.crc32(buffer[:count], crc)
            if left or expected != (hashed.hexdigest() if isinstance(expected, str) else crc):
                found.append(part)
    return found


def write_manifest(folder: Path, sums: Mapping[SavedPart, Sum]) -> None:
    """Write the checksums of all parts, of the index and of themselves, to the disk."""
    content = {
        "metadata": zlib.crc32((folder / METADATA).read_bytes()),
        "parts": [[*astuple(part), crc] for part, crc in sorted(sums.items())],
    }
    with open(folder / MANIFEST, "w", encoding="utf-8") as stream:
        json.dump({"checksum": _own_sum(content), **content}, stream)
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> dict[SavedPart, Sum]:
    """The checksums of a checkpoint's parts, after looking at those of the manifest and of the index.

    Raises:
        CheckpointError: one of these two files is missing, unreadable or has changed.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        own = content.pop("checksum")
        sums = {
            SavedPart(str(file), int(offset), int(length), str(name)): crc if isinstance(crc, str) else int(crc)
            for file, offset, length, name, crc in content["parts"]
        }
        known, intact = content["metadata"], own == _own_sum(content)
    except FileNotFoundError as error:
        raise CheckpointError(no_manifest(folder)) from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} is no list of checksums") from error
    if not intact:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} has changed since it was written")
    try:
        metadata = (folder / METADATA).read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    if zlib.crc32(metadata) != known:
        raise CheckpointError(f"checkpoint {folder} is damaged: {METADATA} has changed since it was written")
    return sums


def no_manifest(folder: Path) -> str:
    """What to say of a checkpoint without checksums."""
    return (
        f"checkpoint {folder} has no {MANIFEST}: it was copied in part, or written by an older version, and may not be "
        "whole"
    )


def damaged(folder: Path, sums: Mapping[SavedPart, Sum]) -> list[str]:
    """What has changed since the checksums were made: file, tensor and place, in words."""
    found = []
    by_file: dict[str, dict[SavedPart, Sum]] = {}
    for part, crc in sums.items():
        by_file.setdefault(part.file, {})[part] = crc
    for file, expected in by_file.items():
        try:
            wrong = _unequal(folder, expected)
        except FileNotFoundError:
            found.append(f"{file} is missing")
        except OSError as error:
            found.append(f"{file} cannot be read ({error.strerror})")
        else:
            found += [f"{p.name} in {file}, bytes {p.offset} to {p.offset + p.length}, has changed" for p in wrong]
    return found


def _own_sum(content: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
