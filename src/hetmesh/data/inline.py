"""Media that a record holds itself, as data URLs (RFC 2397), as requests to chat models do."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

_HEAD = re.compile(r"data:(?P<type>[\w.+-]+/(x-)?(?P<form>[\w.+-]+))?(;[\w.+-]+=[^;,]*)*;base64,")


@dataclass(frozen=True)
class Inline:
    """One media item in a record. Its bytes are not kept: `url` reads the record again.

    Attributes:
        name: a file name of its format.
        length: its bytes.
    """

    name: str
    length: int
    url: Callable[[], str]

    def read(self) -> bytes:
        """All of it. Raises OSError if the text is no base64."""
        _, _, text = self.url().partition(",")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise OSError(f"its data URL is no base64: {error}") from error

    def open(self) -> BinaryIO:
        """A file that holds it."""
        return io.BytesIO(self.read())


def inline(url: str, again: Callable[[], str]) -> Inline:
    """The item of a data URL.

    Args:
        again: gives the URL another time.

    Raises:
        OSError: it is not in base64.
    """
    head = _HEAD.match(url)
    if head is None:
        raise OSError(f"{url[:40]!r} is no data URL of base64 (data:image/png;base64,...)")
    text = len(url) - head.end()
    padding = url[-2:].count("=")
    return Inline(f"inline.{head['form'] or 'bin'}", text * 3 // 4 - padding, again)
