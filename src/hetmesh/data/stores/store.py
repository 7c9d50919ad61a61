"""What a store is: records in files, and the bytes of their media: a stretch of a file, such as one image of a tar
shard, of which no byte beside it is read, or bytes in the record itself."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

STALE = "its index does not fit the files; make it anew: hetmesh index RECIPE, or remove it"

HEADER_BYTES = 4096
"""That are read at once from an opened stretch; of an image they hold its size, unless it begins with a thumbnail."""

MALFORMED_FILE = (SyntaxError, EOFError, LookupError, ArithmeticError, RuntimeError, TypeError, struct.error)
"""What Pillow, wave and numpy raise besides OSError and ValueError where a file's fields lead nowhere."""

_DATA_URL_HEAD = re.compile(r"data:(?P<type>[\w.+-]+/(x-)?(?P<form>[\w.+-]+))?(;[\w.+-]+=[^;,]*)*;base64,")


@dataclass(frozen=True)
class Record:
    """One sample as it is stored: what it is called unless it has an `id`, the record as JSON has it, its stored bytes,
    and the names of the other members that are stored with it."""

    name: str
    value: Any
    size: int
    beside: tuple[str, ...] = ()


class Store(Protocol):
    """An indexed collection of records."""

    files: tuple[Path, ...]
    """What it reads records from."""
    arrays: Mapping[str, np.ndarray]
    """Where records lie in the files."""
    in_order: bool = False
    """Whether media that a record does not name are taken in order."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Record `index`. Raises SampleError: it cannot be read."""

    def media_counts(self, index: int) -> Mapping[str, int]:
        """How many media items of each kind lie in record `index` itself; none where they are files of their own."""
        return {}

    def media(self, index: int, kind: str, value: str | None, number: int) -> Blob:
        """A media item of record `index`. Raises OSError: there is none.

        Args:
            value: what the record says of it, a file name usually; None if it says nothing.
            number: how many items of this kind come before it.
        """


@dataclass(frozen=True, slots=True)
class FileSpan:
    """`size` bytes of a file from `offset` on; None: to its end.

    Its methods raise OSError where the file cannot be read or ends too early.
    """

    path: Path
    offset: int = 0
    size: int | None = None
    member: str = ""

    @property
    def name(self) -> str:
        return self.member or self.path.name

    @property
    def length(self) -> int:
        if self.size is not None:
            return self.size
        try:
            status = self.path.stat()
        except FileNotFoundError:
            raise FileNotFoundError("there is no such file; names start in [data.options] media_folder") from None
        if not stat.S_ISREG(status.st_mode):  # reading a pipe may never end
            raise OSError(f"{self.path} is not a regular file")
        return status.st_size - self.offset

    def read(self) -> bytes:
        length = self.length
        with self.path.open("rb", buffering=0) as file:  # a buffer would be filled, also for a short text
            file.seek(self.offset)
            data = file.read(length) or b""
            while len(data) < length and (more := file.read(length - len(data))):
                data += more
        if len(data) < length:
            raise OSError(f"{self.path} ends after {self.offset + len(data)} bytes, need {self.offset + length}")
        return data

    def open(self) -> BinaryIO:
        """A file of it alone, read piece by piece."""
        return io.BufferedReader(_Stretch(self.path, self.offset, self.length), HEADER_BYTES)

    def __str__(self) -> str:
        return str(self.path) if self.size is None else f"{self.path} (bytes {self.offset}..{self.offset + self.size})"


class _Stretch(io.FileIO):
    """`length` bytes of a file from `first` on, as a file."""

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # type: ignore[assignment]  # which call `readinto`

    def __init__(self, path: Path, first: int, length: int) -> None:
        super().__init__(path)
        self._first, self._length = first, length
        self.seek(0)

    def tell(self) -> int:
        return super().tell() - self._first

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = self.tell() if whence == io.SEEK_CUR else self._length if whence == io.SEEK_END else 0
        return super().seek(self._first + start + offset) - self._first

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: max(self._length - self.tell(), 0)])


@dataclass(frozen=True)
class RecordBlob:
    """A media item in a record itself, whose bytes `read` gives: a file name of its format, its length, the bytes."""

    name: str
    length: int
    read: Callable[[], bytes] = field(repr=False)

    def open(self) -> BinaryIO:
        return io.BytesIO(self.read())

    def __str__(self) -> str:
        return f"{self.name} ({self.length} bytes in the record)"


Blob = FileSpan | RecordBlob
"""The stored bytes of one media item. `name` is its file's, which tells its format; whoever reads a header of the file
that `open` gives reads little more. Reading raises OSError."""


def data_url(url: str, again: Callable[[], str]) -> RecordBlob:
    """The item of a data URL (RFC 2397), as requests to chat models have them. Its bytes are not kept: `again` gives
    the URL another time. Raises OSError: it is not in base64."""
    head = _DATA_URL_HEAD.match(url)
    if head is None:
        raise OSError(f"{url[:40]!r} is no data URL of base64 (data:image/png;base64,...)")

    def read() -> bytes:
        _, _, text = again().partition(",")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise OSError(f"its data URL is no base64: {error}") from error

    length = (len(url) - head.end()) * 3 // 4 - url[-2:].count("=")
    return RecordBlob(f"inline.{head['form'] or 'bin'}", length, read)


def npy_shape(file: BinaryIO, length: int) -> tuple[int, ...]:
    """The shape of the numbers that `file` of `length` bytes holds from here on, from its header. Raises ValueError: it
    is no npy file of numbers, or claims more than the file holds."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = read(file)
    except Exception as error:  # a header is a Python literal, and whatever reading one may raise
        raise ValueError(f"its header is none: {error or type(error).__name__}") from error
    if dtype.kind not in "fiu":
        raise ValueError(f"its values are of type {dtype}, not numbers")
    left, needed = length - (file.tell() - start), math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or needed > left:
        raise ValueError(f"its header says {list(shape)}, {needed} bytes, and there are {left}")
    return shape
