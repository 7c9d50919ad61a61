"""The files of a run that hold a JSON object per line, as far as they can be read: kills, full disks and resumed runs
leave lines that are cut, damaged or void."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.files import from_json, read_file
from hetmesh.formatting import counted
from hetmesh.records.dump_folder import METRICS_FILE
from hetmesh.records.events import EVENTS_FILE
from hetmesh.report.run_series import number

Line = Mapping[str, Any]


@dataclass(frozen=True)
class MetricsLines:
    """metrics.jsonl as its steps counted in the end.

    Attributes:
        steps: one line per step, ascending.
        evaluations: lines with a `validation`, one per step, ascending.
        notes: what is wrong with the file, and was left out.
    """

    steps: tuple[Line, ...]
    evaluations: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def metrics_lines(folder: Path) -> MetricsLines | None:
    """The metrics.jsonl of a run; None: no run is in the folder. A line whose step is not above those before it is of a
    resumed run: what was there of that step and later ones is void, as training has trimmed it since.

    Raises:
        RecipeError: it cannot be read, or there are lines, but none of them can.
    """
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
        raise RecipeError(f"{folder / METRICS_FILE}: cannot be read: {bad[0]}")
    notes = _told(bad, METRICS_FILE)
    notes += [f"{counted(again, 'step')} were done again by a resumed run, and count once"] if again else []
    return MetricsLines(tuple(steps), tuple(evaluations), tuple(notes))


def event_lines(folder: Path) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The events.jsonl of a run, none where there is no such file, and what is wrong with it.

    Raises:
        RecipeError: it cannot be read.
    """
    try:
        lines, bad = _lines(folder / EVENTS_FILE, "an event, a step and a timestamp", _is_event)
    except FileNotFoundError:
        return (), ()
    return tuple(lines), tuple(_told(bad, EVENTS_FILE))


def _drop_from(lines: list[Line], step: int) -> int:
    """Drop the lines at the end that are not before `step`; how many they were."""
    before = len(lines)
    while lines and lines[-1]["step"] >= step:
        lines.pop()
    return before - len(lines)


def _lines(path: Path, needs: str, good: Callable[[Line], bool]) -> tuple[list[Line], list[str]]:
    """The objects that a file holds, and what is wrong with its other lines. Raises FileNotFoundError too."""
    try:
        lines = read_file(path).decode("utf-8", errors="replace").split("\n")  # what a full disk leaves is no text
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a name may hold a null byte
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    kept: list[Line] = []
    bad: list[str] = []
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = from_json(line)
            if not isinstance(found, dict) or not good(found):
                raise ValueError(f"it must hold a JSON object with {needs}, got {line[:60]!r}")
        except ValueError as error:
            bad.append(f"line {place}: {error}")
        else:
            kept.append(found)
    return kept, bad


def _has_step(line: Line) -> bool:
    return type(line.get("step")) is int


def _is_event(line: Line) -> bool:
    return _has_step(line) and isinstance(line.get("event"), str) and number(line.get("timestamp")) is not None


def _told(bad: list[str], name: str) -> list[str]:
    return [f"{counted(len(bad), 'line')} of {name} cannot be read and are left out, first {bad[0]}"] if bad else []
