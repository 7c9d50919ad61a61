"""Numbers of a run's metrics over its steps. Lines may lack any of them, or hold something else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Series:
    """One number over the steps that have it.

    Attributes:
        name: as a legend says it.
        steps: ascending.
        values: one for each step, finite.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def median(self) -> float:
        """Of the values; without the first step, which also starts everything, where there are others."""
        later = [value for step, value in zip(self.steps, self.values, strict=True) if step > 1]
        return median(later or self.values)


def series(records: Iterable[Mapping[str, Any]], *path: str, name: str = "") -> Series:
    """The number at `path` of nested tables, of all records that have one."""
    found = [(record["step"], value) for record in records if (value := number(at(record, *path))) is not None]
    return Series(name or path[-1], tuple(step for step, _ in found), tuple(value for _, value in found))


def at(record: object, *path: str) -> Any:
    """What nested tables hold at `path`, else None."""
    for key in path:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -math.inf < value < math.inf else None


def names_in(records: Iterable[Mapping[str, Any]], *path: str) -> tuple[str, ...]:
    """Keys of the table at `path` of any record, in the order in which they come."""
    found: dict[str, None] = {}
    for record in records:
        if isinstance(table := at(record, *path), Mapping):
            found |= dict.fromkeys(table)
    return tuple(found)
