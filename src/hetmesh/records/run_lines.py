"""The files of a run that hold a JSON object per line, as far as they can be read (kills, full disks and resumed runs
leave lines that are cut, damaged or void), and numbers of these lines over the steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hetmesh.errors import UsageError
from hetmesh.files import read_lines
from hetmesh.formatting import counted
from hetmesh.records.dump_folder import METRICS_FILE
from hetmesh.records.events import EVENTS_FILE

Line = Mapping[str, Any]


@dataclass(frozen=True)
class MetricsLines:
    """metrics.jsonl as its steps counted in the end: a line per step, ascending; lines with a `validation`, likewise;
    what is wrong with the file, and was left out."""

    steps: tuple[Line, ...]
    evaluations: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def metrics_lines(folder: Path) -> MetricsLines | None:
    """The metrics.jsonl of a run; None: no run is in the folder. A line whose step is not above those before it is of a
    resumed run: what was there of that step and later ones is void, as training has trimmed it since. Raises
    UsageError: it cannot be read, or there are lines, but none of them can."""
    try:
        lines, bad = _lines(folder / METRICS_FILE, "a step", _has_step)
    except FileNotFoundError:
        return None
    steps: list[Line] = []
    evaluations: list[Line] = []
    again = 0
    for line in lines:
        evaluated = isinstance(line.get("validation"), Mapping)
        _drop_from(evaluations, line["step"])
        if not evaluated:
            again += _drop_from(steps, line["step"])
        (evaluations if evaluated else steps).append(line)
    if bad and not lines:
        raise UsageError(f"{folder / METRICS_FILE}: cannot be read: {bad[0]}")
    notes = _left_out(bad, METRICS_FILE)
    notes += [f"{counted(again, 'step')} were done again by a resumed run, and count once"] if again else []
    return MetricsLines(tuple(steps), tuple(evaluations), tuple(notes))


def event_lines(folder: Path) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The events.jsonl of a run, none without one, and what is wrong with it. Raises UsageError: it cannot be read."""
    try:
        lines, bad = _lines(folder / EVENTS_FILE, "an event, a step and a timestamp", _is_event)
    except FileNotFoundError:
        return (), ()
    return tuple(lines), tuple(_left_out(bad, EVENTS_FILE))


def _drop_from(lines: list[Line], step: int) -> int:
    """Drop the lines at the end that are not before `step`; returns their number."""
    before = len(lines)
    while lines and lines[-1]["step"] >= step:
        lines.pop()
    return before - len(lines)


def _lines(path: Path, needs: str, valid: Callable[[Line], bool]) -> tuple[list[Line], list[str]]:
    """The objects that a file holds, and what is wrong with its other lines. Raises FileNotFoundError too."""
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a name may hold a null byte
        raise UsageError(f"{path}: cannot be read: {error}") from error
    records: list[Line] = []
    bad: list[str] = []
    for line_number, (line, record) in enumerate(lines, 1):
        if isinstance(record, dict) and valid(record):
            records.append(record)
        elif isinstance(record, ValueError) and line.strip():
            bad.append(f"line {line_number}: {record}")
        elif line.strip():
            bad.append(f"line {line_number}: it must hold a JSON object with {needs}, got {line[:60]!r}")
    return records, bad


def _has_step(line: Line) -> bool:
    return type(line.get("step")) is int


def _is_event(line: Line) -> bool:
    return _has_step(line) and isinstance(line.get("event"), str) and number(line.get("timestamp")) is not None


def _left_out(bad: list[str], name: str) -> list[str]:
    return [f"{counted(len(bad), 'line')} of {name} cannot be read and are left out, first {bad[0]}"] if bad else []


@dataclass(frozen=True)
class Series:
    """One number over the steps that have it: its name in a legend, the steps, ascending, a finite value for each."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def median(self) -> float:
        return median(self.values)

    def times(self, factor: float) -> Series:
        """The same in another unit."""
        return Series(self.name, self.steps, tuple(factor * value for value in self.values))


def series(records: Iterable[Line], *path: str, name: str = "") -> Series:
    """The number at `path` of nested tables, of all records that have one."""
    steps, values = [], []
    for record in records:  # of which a page reads a hundred thousand, fifty times
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and (finite := number(value)) is not None:
            steps.append(record["step"])
            values.append(finite)
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
    return value if abs(value) <= sys.float_info.max else None


def names_in(records: Iterable[Line], *path: str) -> tuple[str, ...]:
    """Keys of the table at `path` of any record, in the order in which they come."""
    names: dict[str, None] = {}
    for record in records:
        if isinstance(table := at(record, *path), dict):
            names |= dict.fromkeys(table)
    return tuple(names)
