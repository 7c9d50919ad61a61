"""Stores: where records and their media lie in files: JSON lines, tar shards, tables."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from hetmesh.data.spans import FileSpan
from hetmesh.errors import RecipeError, SampleError
from hetmesh.files import from_json, place_in, read_file
from hetmesh.graph.meta_arrays import check_ends

TEXTS = ("json", "txt")
"""Members of a tar shard that make a record, by extension; of these the first that a sample has."""


_UNFIT = "its index does not fit the files; make it anew: hetmesh index RECIPE, or remove it"


class Blob(Protocol):
    """The stored bytes of one media item. Reading raises OSError."""

    @property
    def name(self) -> str:
        """Its file name, which tells its format."""
        ...

    @property
    def length(self) -> int:
        """Stored bytes."""
        ...

    def read(self) -> bytes:
        """All of it."""
        ...

    def open(self) -> BinaryIO:
        """A file that holds it alone; who reads a header of it reads little more."""
        ...


@dataclass(frozen=True)
class Record:
    """One sample as it is stored.

    Attributes:
        name: what it is called, unless it has an `id`.
        value: the record, as JSON has it.
        size: stored bytes of it.
        beside: names of the other members that are stored with it.
    """

    name: str
    value: Any
    size: int
    beside: tuple[str, ...] = ()


class Store(Protocol):
    """An indexed collection of records."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads records from."""
        ...

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """Where records lie in the files."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether media that a record does not name are taken in order."""
        ...

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Record `index`.

        Raises:
            SampleError: it cannot be read.
        """
        ...

    def held(self, index: int) -> Mapping[str, int]:
        """How many media items of each kind lie in record `index` itself; none where they are files of their own."""
        ...

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """A media item of record `index`.

        Args:
            value: what the record says of it, a file name usually; None if it says nothing.
            number: how many items of this kind come before it.

        Raises:
            OSError: there is none.
        """
        ...


class JsonFile:
    """One record per line, or a JSON list of records; media are files in some folders, names start in the first."""

    in_order = False

    def __init__(
        self, path: Path, folders: Sequence[Path], key: str, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self.path, self.folders = path, tuple(folders)
        self.files = (path,)
        self._list: list[Any] | None = None
        with path.open("rb") as file:
            starts = path.suffix == ".json" and file.read(64).lstrip().startswith(b"[")
        if starts:
            try:
                found = from_json(read_file(path))
            except ValueError as error:
                raise RecipeError(f"{key} = '{path}': begins as a JSON list, but is none: {error}") from error
            self._list = found
        if arrays is None:
            arrays = {"starts": np.zeros(0, np.int64) if starts else _line_starts(path)}
        elif arrays["starts"].dtype != np.int64 or arrays["starts"].ndim != 1 or (arrays["starts"] < 0).any():
            raise RecipeError(f"{key}: {_UNFIT}")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["starts"]) if self._list is None else len(self._list)

    def record(self, index: int) -> Record:
        """The record in line `index`; empty lines do not count."""
        name = f"{self.path.name}:{index}"
        if self._list is not None:
            return Record(name, self._list[index], len(json.dumps(self._list[index])))
        with self.path.open("rb") as file:
            file.seek(int(self.arrays["starts"][index]))
            line = file.readline()
        try:
            return Record(name, from_json(line), len(line))
        except ValueError as error:
            raise SampleError(
                f"sample {name!r}: must be an object with `messages`, but the line is no JSON: {error}"
            ) from error

    def held(self, index: int) -> Mapping[str, int]:
        """None."""
        return {}

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """The file of that name."""
        if value is None:
            raise OSError(f"the record names no file of its {kind!r} {number}")
        return FileSpan(place_in(self.folders, value))


def _line_starts(path: Path) -> np.ndarray:
    """Byte offsets of the lines that are not empty."""
    starts, offset = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(offset)
            offset += len(line)
    return np.array(starts, np.int64)


class TarShards:
    """Tar shards as webdataset writes them: consecutive members `KEY.EXTENSION` of one key are a sample.

    Members are found once and read by their offset from a plain file. `KEY.json` is a record whose media are named by
    extension or file name; `KEY.txt` is what the assistant says of all images and recordings beside it, in their order.
    A shard that ends too early makes its last sample unreadable: what came after cannot be known.
    """

    in_order = False

    def __init__(self, files: Sequence[Path], key: str, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self.files = tuple(files)
        self.arrays: Mapping[str, np.ndarray] = _scan(self.files, key) if arrays is None else arrays
        if arrays is not None:
            try:
                self._check()
            except (ValueError, KeyError, OSError) as error:
                raise RecipeError(f"{key}: {_UNFIT} ({error})") from error
        if not len(self):
            raise RecipeError(f"{key}: the tar shards hold no samples")

    def __len__(self) -> int:
        return len(self.arrays["sample_members"]) - 1

    def _check(self) -> None:
        """Raise ValueError unless offsets of an index lead into the files."""
        members, names, cut = (self.arrays[name] for name in ("members", "names", "cut"))
        samples, name_ends = self.arrays["sample_members"], self.arrays["name_ends"]
        if members.dtype != np.int64 or members.shape != (len(members), 3) or names.dtype != np.uint8 or cut.ndim != 1:
            raise ValueError("arrays of another form")
        check_ends("sample_members", samples, max(len(samples) - 1, 0), len(members))
        check_ends("name_ends", name_ends, len(members), len(names))
        if (np.diff(samples) < 1).any() or not ((members >= 0).all() and (members[:, 0] < len(self.files)).all()):
            raise ValueError("samples without members, or members of no shard")
        sizes = np.array([file.stat().st_size for file in self.files], np.int64)[members[:, 0]]
        whole = (members[:, 1] <= sizes) & (members[:, 2] <= sizes)  # the last one may be cut off
        if not whole.all():
            raise ValueError("members behind the end of their shard")

    def _members(self, index: int) -> Iterator[tuple[str, FileSpan]]:
        first, stop = self.arrays["sample_members"][index : index + 2].tolist()
        for member in range(first, stop):
            shard, offset, size = self.arrays["members"][member].tolist()
            start, end = self.arrays["name_ends"][member : member + 2].tolist()
            name = self.arrays["names"][start:end].tobytes().decode()
            yield name, FileSpan(self.files[shard], offset, size, name)

    def record(self, index: int) -> Record:
        """The record of sample `index`."""
        found = list(self._members(index))
        members = {extension(name): span for name, span in found}
        key = found[0][0].removesuffix("." + extension(found[0][0]))
        shard = int(self.arrays["members"][self.arrays["sample_members"][index], 0])
        if index in self.arrays["cut"]:
            raise SampleError(
                f"sample {key!r}: {self.files[shard]} is cut off: it ends within this sample or behind it"
            )
        if len(members) < len(found):
            raise SampleError(f"sample {key!r} of {self.files[shard]}: it has two members of one extension")
        text = next((each for each in TEXTS if each in members), None)
        if text is None:
            raise SampleError(
                f"sample {key!r} of {self.files[shard]}: it has no .json and no .txt, only {list(members)}"
            )
        try:
            data = members[text].read()
            value = from_json(data) if text == "json" else _caption(data.decode(), members)
        except (OSError, ValueError) as error:
            raise SampleError(f"sample {key!r} of {self.files[shard]}: {error}") from error
        beside = tuple(name for name, _ in found if extension(name) != text)
        return Record(key, value, len(data), beside)

    def held(self, index: int) -> Mapping[str, int]:
        """None."""
        return {}

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """The member with this name, else with this extension, else with this name in its folder."""
        for called in (str, extension, lambda name: name.rpartition("/")[2]):
            for name, span in self._members(index):
                if value == called(name):
                    return span
        raise OSError(f"there is no member {value!r}, only {[name for name, _ in self._members(index)]}")


IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
SOUNDS = ("wav", "npy")
UNREAD = ("mp3", "flac", "ogg", "opus", "m4a", "aac", "mp4", "avi", "mov", "mkv", "webm")
"""Recordings and videos, which are not read: a caption of one is no text by itself."""


def _caption(text: str, members: Mapping[str, FileSpan]) -> dict[str, Any]:
    """The conversation of a caption. Raises ValueError if a member beside it holds media that are not read."""
    kinds = {each: each.rpartition(".")[2] for each in members}  # x.0.png and x.seg.png are images too
    if unread := [span.name for each, span in members.items() if kinds[each] in UNREAD]:
        raise ValueError(f"{unread[0]!r} cannot be read; images may be {IMAGES}, recordings {SOUNDS}")
    media = [{"type": "image", "image": members[each].name} for each, kind in kinds.items() if kind in IMAGES]
    media += [{"type": "audio", "audio": members[each].name} for each, kind in kinds.items() if kind in SOUNDS]
    if not media and (others := [span.name for each, span in members.items() if each not in TEXTS]):
        raise ValueError(f"it has only {others[0]!r} beside its text; images may be {IMAGES}, recordings {SOUNDS}")
    return {"messages": [{"role": "user", "content": media}, {"role": "assistant", "content": text}]}


def extension(name: str) -> str:
    """What follows the first dot of a file's name, in lower case: webdataset's idea of an extension."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def _scan(files: Sequence[Path], key: str) -> dict[str, np.ndarray]:
    """Where the members of tar shards lie, without reading their content.

    Returns:
        `members` `[n, 3]`: shard, offset, size. `names`, `name_ends`: their names, one behind the other.
        `sample_members` `[samples + 1]`: where the members of each sample begin. `cut`: samples with which a shard ends
        too early.
    """
    members: list[tuple[int, int, int]] = []
    names: list[bytes] = []
    starts: list[int] = []
    cut: list[int] = []
    for shard, path in enumerate(files):
        last = None
        total = path.stat().st_size
        whole = False
        try:
            with _Bounded(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
                behind = 0
                while (member := archive.next()) is not None:
                    if archive.offset <= behind or member.size < 0:
                        raise tarfile.ReadError("a member has a negative size")
                    behind = archive.offset
                    if not member.isfile():
                        continue
                    now = member.name[: len(member.name) - len(extension(member.name))]
                    names.append(member.name.encode())  # which fails for a name that is no UTF-8
                    if now != last:
                        starts.append(len(members))
                        last = now
                    members.append((shard, member.offset_data, member.size))
                whole = archive.offset + tarfile.BLOCKSIZE <= total  # the block of zeros that ends an archive
        except Exception as error:  # whatever tarfile makes of a broken file
            if last is None:
                reason = error or type(error).__name__
                raise RecipeError(
                    f"{key}: {path} is no tar shard, or ends within its first sample: {reason}"
                ) from error
        if last is not None and not whole:
            cut.append(len(starts) - 1)
    return {
        "members": np.array(members, np.int64).reshape(-1, 3),
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_ends": np.cumsum([0, *map(len, names)], dtype=np.int64),
        "sample_members": np.array([*starts, len(members)], np.int64),
        "cut": np.array(cut, np.int64),
    }


class _Bounded(io.FileIO):
    """A file that takes no memory for more bytes than it has, however many are asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left))


@dataclass(frozen=True)
class Held:
    """A media item whose bytes are in memory."""

    name: str
    data: bytes

    @property
    def length(self) -> int:
        """Its bytes."""
        return len(self.data)

    def read(self) -> bytes:
        """All of it."""
        return self.data

    def open(self) -> BinaryIO:
        """A file that holds it."""
        return io.BytesIO(self.data)
