"""Tar shards as webdataset writes them: consecutive members of one key are a sample."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetmesh.data.stores.columns import Columns
from hetmesh.data.stores.store import STALE, Blob, FileSpan, Record, Store
from hetmesh.errors import RecipeError, SampleError
from hetmesh.files import from_json
from hetmesh.graph.meta_arrays import check_ends

TEXTS = ("json", "txt")
"""Members of a tar shard that make a record, by extension."""

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
SOUNDS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac")
FORMATS = {"image": IMAGES, "video": ("mp4", "avi", "mov", "mkv", "webm"), "audio": SOUNDS}
"""Kind of media -> extensions of its files."""


class TarShards(Store):
    """Consecutive members `KEY.EXTENSION` of one key are a sample.

    Members are found once and read by their offset from a plain file. `KEY.json` is a record whose media are named by
    extension or file name. `KEY.txt` is what the assistant says of all images and recordings beside it, in their order,
    unless `KEY.json` is a conversation itself; a JSON caption counts where there is no `KEY.txt` (`Columns`). A shard
    that ends too early makes its last sample unreadable: what came after cannot be known.
    """

    def __init__(
        self, files: Sequence[Path], key: str, columns: Columns, arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self.files, self._columns = tuple(files), columns
        self.arrays = _scan(self.files, key) if arrays is None else arrays
        if arrays is not None:
            try:
                self._check()
            except (ValueError, KeyError, OSError) as error:
                raise RecipeError(f"{key}: {STALE} ({error})") from error
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
        if ((members[:, 1] > sizes) | (members[:, 2] > sizes)).any():  # the last one may be cut off
            raise ValueError("members beyond the end of their shard")

    def _members(self, index: int) -> Iterator[tuple[str, FileSpan]]:
        first, stop = self.arrays["sample_members"][index : index + 2].tolist()
        for member in range(first, stop):
            shard, offset, size = self.arrays["members"][member].tolist()
            start, end = self.arrays["name_ends"][member : member + 2].tolist()
            name = self.arrays["names"][start:end].tobytes().decode()
            yield name, FileSpan(self.files[shard], offset, size, name)

    def record(self, index: int) -> Record:
        stored = list(self._members(index))
        members = {extension(name): span for name, span in stored}
        key = stored[0][0].removesuffix("." + extension(stored[0][0]))
        shard = self.files[int(self.arrays["members"][self.arrays["sample_members"][index], 0])]
        if index in self.arrays["cut"]:
            raise SampleError(f"sample {key!r}: {shard} is cut off: it ends within this sample or after it")
        if len(members) < len(stored):
            raise SampleError(f"sample {key!r} of {shard}: it has two members of one extension")
        if not members.keys() & {*TEXTS}:
            raise SampleError(f"sample {key!r} of {shard}: it has no .json and no .txt, only {list(members)}")
        used = [name for name in ("json",) if name in members]
        try:
            value: Any = from_json(members["json"].read()) if used else {}
            if "txt" in members and self._columns.takes_caption(value):
                used.append("txt")
                value = {**value, "text": members["txt"].read().decode()}
        except (OSError, ValueError, TypeError) as error:
            raise SampleError(f"sample {key!r} of {shard}: {error}") from error
        left = tuple(name for name, _ in stored if extension(name) not in used)
        size = sum(members[name].length for name in used)
        return self._columns.record(key, value, size, left, beside=lambda: _media(members), where=f" of {shard}")

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """The member with this name, else with this extension, else with this name in its folder."""
        for called in (str, extension, lambda name: name.rpartition("/")[2]):
            for name, span in self._members(index):
                if value == called(name):
                    return span
        raise OSError(f"there is no member {value!r}, only {[name for name, _ in self._members(index)]}")


def _media(members: Mapping[str, FileSpan]) -> dict[str, list[str]]:
    """The names of the media among members. Raises ValueError if all that is beside the text is something else."""
    formats = {name: name.rpartition(".")[2] for name in members}  # x.0.png and x.seg.png are images too
    media = {kind: [members[n].name for n, form in formats.items() if form in known] for kind, known in FORMATS.items()}
    if not any(media.values()) and (others := [span.name for name, span in members.items() if name not in TEXTS]):
        raise ValueError(f"it has only {others[0]!r} beside its text; media may be {FORMATS}")
    return media


def extension(name: str) -> str:
    """What follows the first dot of a file's name, in lower case: webdataset's idea of an extension."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def _scan(files: Sequence[Path], key: str) -> dict[str, np.ndarray]:
    """Where the members of tar shards lie, without reading their content. `members` `[n, 3]`: shard, offset, size.
    `names`, `name_ends`: their names, end to end. `sample_members` `[samples + 1]`: where the members of each sample
    begin. `cut`: samples with which a shard ends too early."""
    members: list[tuple[int, int, int]] = []
    names: list[bytes] = []
    starts: list[int] = []
    cut: list[int] = []
    for shard, path in enumerate(files):
        last_key, complete = None, False
        try:
            with _Bounded(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
                end = 0
                while (member := archive.next()) is not None:
                    if archive.offset <= end or member.size < 0:
                        raise tarfile.ReadError("a member has a negative size")
                    end = archive.offset
                    if not member.isfile():
                        continue
                    names.append(member.name.encode())  # which fails for a name that is no UTF-8
                    key_of_member = member.name[: len(member.name) - len(extension(member.name))]
                    if key_of_member != last_key:
                        starts.append(len(members))
                        last_key = key_of_member
                    members.append((shard, member.offset_data, member.size))
                # an archive ends with a block of zeros
                complete = archive.offset + tarfile.BLOCKSIZE <= path.stat().st_size
        except Exception as error:  # whatever tarfile makes of a broken file
            if last_key is None:
                reason = error or type(error).__name__
                raise RecipeError(
                    f"{key}: {path} is no tar shard, or ends within its first sample: {reason}"
                ) from error
        if last_key is not None and not complete:
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
