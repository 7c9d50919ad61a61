"""Whole numbers from callers: fractions and other types are refused, where int() would cut them silently."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from hetmesh.errors import LayoutError


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
