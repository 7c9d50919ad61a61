"""FileSpan: a stretch of a file, such as one image of a tar shard; whoever reads one reads no byte beside it."""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

HEADER = 4096
"""Bytes that are read at once by who wants a header only; of an image they hold its size, unless it begins with a
thumbnail."""


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
        """What it is called: a member's name, or the file's."""
        return self.member or self.path.name

    @property
    def length(self) -> int:
        """How many bytes it has."""
        if self.size is not None:
            return self.size
        found = self.path.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe may never end
            raise OSError(f"{self.path} is not a regular file")
        return found.st_size - self.offset

    def read(self) -> bytes:
        """All of it."""
        length = self.length
        file = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        try:
            os.lseek(file, self.offset, os.SEEK_SET)
            found = os.read(file, length)  # nearly always all of it, without a copy
            while len(found) < length and (more := os.read(file, length - len(found))):
                found += more
        finally:
            os.close(file)
        if len(found) < length:
            raise OSError(f"{self.path} ends after {self.offset + len(found)} bytes, need {self.offset + length}")
        return found

    def open(self) -> BinaryIO:
        """A file that holds it alone, read piece by piece."""
        return io.BufferedReader(_Raw(self), HEADER)

    def __str__(self) -> str:
        return str(self.path) if self.size is None else f"{self.path} (bytes {self.offset}..{self.offset + self.size})"


class _Raw(io.RawIOBase):
    def __init__(self, span: FileSpan) -> None:
        self._first, self._length = span.offset, span.length
        self._file = span.path.open("rb", buffering=0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._first + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
