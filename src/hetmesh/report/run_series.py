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
        """Of the values."""
        return median(self.values)


def series(records: Iterable[Mapping[str, Any]], *path: str, name: str = "") -> Series:
    """The number at `path` of nested tables, of all records that have one."""
    steps, values = [], []
    for record in records:  # of which a page reads a hundred thousand, fifty times
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and (found := number(value)) is not None:
            steps.append(record["step"])
            values.append(found)
    return Series(name or path[-1], tuple(steps), tuple(values))


def at(record: object, *path: str) -> Any:
    """What nested tables hold at `path`, else None. Tables are dicts, as JSON has them."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
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
        if isinstance(table := at(record, *path), dict):
            found |= dict.fromkeys(table)
    return tuple(found)
