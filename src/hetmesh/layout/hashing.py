"""Values of thousands of numbers: hashed once per process, and results of their methods kept with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class HashedOnce:
    """For frozen dataclasses that are looked up at every step; they say `__hash__ = HashedOnce.__hash__` themselves.

    A pickle leaves the hash out: strings hash differently in another process, where equal values would miss in caches.
    """

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def memoized(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method, with positional arguments, whose results live as long as the instance (`functools.cache` keeps it)."""
    name = f"_{method.__name__}_results"

    @wraps(method)
    def known_or_new(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        known = self.__dict__.setdefault(name, {})
        if args not in known:
            known[args] = method(self, *args, **kwargs)
        return known[args]

    return known_or_new
