"""Ordered lists of half-open global intervals: the one representation of every share of a tensor dim; and the check of
whole numbers from callers: fractions and other types are refused, where int() would cut them silently."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from hetmesh.errors import LayoutError

Interval = tuple[int, int]
"""`(start, stop)`: global positions start, ..., stop - 1 along one tensor dim."""

Intervals = tuple[Interval, ...]
"""Intervals in local order: their concatenation is the local extent along one tensor dim."""


def extent(intervals: Sequence[Interval]) -> int:
    """Total length."""
    return sum(stop - start for start, stop in intervals)


def coalesce(intervals: Sequence[Interval]) -> Intervals:
    """Join neighbours in the list where one ends exactly where the next begins; drop empty ones."""
    out: list[Interval] = []
    for a, b in intervals:
        if a == b:
            continue
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> int:
    """How many positions two ascending lists share."""
    shared = first = 0
    for start, stop in a:
        while first < len(b) and b[first][1] <= start:
            first += 1
        i = first
        while i < len(b) and b[i][0] < stop:
            shared += min(stop, b[i][1]) - max(start, b[i][0])
            i += 1
    return shared


def locate(local: Sequence[Interval], wanted: Sequence[Interval]) -> Intervals:
    """Local positions of the global intervals `wanted`, each of which lies inside one interval of `local`.

    Returns local `[start, stop)` ranges, neighbours joined, in the order of `wanted`.
    """
    table, offset = [], 0
    for a, b in local:
        table.append((a, b, offset - a))
        offset += b - a
    table.sort()
    out, i = [], 0
    for a, b in wanted:
        while not (table[i][0] <= a and b <= table[i][1]):
            i += 1
        out.append((a + table[i][2], b + table[i][2]))
    return coalesce(out)


def whole_numbers(values: Iterable[object], what: str) -> tuple[int, ...]:
    """`values` as plain ints; numpy's count. Raises LayoutError, whose message begins with `what`."""
    try:
        given = tuple(values)
    except TypeError:
        raise LayoutError(f"{what} must be whole numbers, got {values!r}") from None
    if all(kind is int for kind in set(map(type, given))):
        return given  # type: ignore[return-value]
    try:
        return tuple(operator.index(value) for value in given)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"{what} must be whole numbers, got {given!r}") from None


def check_shape(shape: Iterable[object]) -> tuple[int, ...]:
    """A global shape. Raises LayoutError for what is not whole or below 0."""
    sizes = whole_numbers(shape, "the sizes of a shape")
    if any(size < 0 for size in sizes):
        raise LayoutError(f"the sizes of a shape must not be negative, got {sizes}")
    return sizes
