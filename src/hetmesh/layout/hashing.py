"""Values of thousands of numbers are looked up in caches at every step: hash them once per process."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any


class HashedOnce:
    """For frozen dataclasses; they must say `__hash__ = HashedOnce.__hash__`, or dataclass writes its own.

    A pickle leaves the hash out: strings hash differently in another process, and equal values would then miss in its
    caches.
    """

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
