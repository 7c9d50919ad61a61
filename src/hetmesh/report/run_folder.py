"""What a run has left in its dump folder, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.errors import GraphError, RecipeError
from hetmesh.files import from_json, json_object, read_file
from hetmesh.report.run_load import RunLoad, run_load
from hetmesh.simulate import Timeline
from hetmesh.training.wording import counted

METRICS = "metrics.jsonl"
SHOWN = ("step", "loss", "grad_norm", "samples_per_s", "tokens_per_s", "mfu", "memory_bytes")


@dataclass(frozen=True)
class RunView:
    """A run.

    Attributes:
        last: the last line of metrics.jsonl.
        summary: summary.json; empty while the run lasts.
        step: which step was recorded, 0 for none.
        timelines: `predicted`, where it could be, and `measured`.
        load: how even its microbatches were; None where it was not reported.
        records: lines of metrics.jsonl, one per step, ascending.
        notes: what is wrong with metrics.jsonl, and was left out.
    """

    last: Mapping[str, Any]
    summary: Mapping[str, Any]
    step: int
    timelines: Mapping[str, Timeline]
    load: RunLoad | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Its figures, a line each."""
        figures = {key: self.last[key] for key in SHOWN if key in self.last} | dict(self.summary)
        width = max(map(len, figures), default=0)
        lines = [f"{key:<{width}}  {_shown(value)}" for key, value in figures.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines if self.load is None else [*lines, "", self.load.as_text()])


def read_run(folder: str | Path) -> RunView:
    """Read a dump folder.

    Raises:
        RecipeError: there is no run in it, or a file of it cannot be read.
    """
    folder = Path(folder)
    if (found := metrics_records(folder)) is None:
        raise RecipeError(f"{folder}: there is no metrics.jsonl in it; give a run's dump_folder")
    records, notes = found
    path = folder / "timeline.json"
    recorded = _json(path)
    try:
        timelines: dict[str, Timeline] = {
            key: Timeline.from_json(recorded[key]) for key in ("predicted", "measured") if key in recorded
        }
    except GraphError as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    step = recorded.get("step")
    last = records[-1] if records else {}
    summary = _json(folder / "summary.json")
    try:
        load = run_load(records)
        _ = load and load.as_text()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RecipeError(f"{folder / METRICS}: a `load` is not as training writes it: {error!r}") from error
    return RunView(last, summary, step if isinstance(step, int) else 0, timelines, load, records, notes)


def metrics_records(folder: Path) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]] | None:
    """The steps of a run's metrics.jsonl as they counted in the end, and what is wrong with it; None: no run is in the
    folder. A line whose step is not above those before it is of a resumed run: what was there of that step and
    later ones is void, as training has trimmed it since.

    Raises:
        RecipeError: it cannot be read, or there are lines, but none of them can.
    """
    path = folder / METRICS
    try:
        lines = read_file(path).decode("utf-8", errors="replace").split("\n")  # what a full disk leaves is no text
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a name may hold a null byte
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    kept: list[dict[str, Any]] = []
    bad: list[str] = []
    again = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _record(line)
        except ValueError as error:
            bad.append(f"line {number}: {error}")
            continue
        while kept and kept[-1]["step"] >= found["step"]:
            kept.pop()
            again += 1
        kept.append(found)
    if bad and not kept:
        raise RecipeError(f"{path}: cannot be read: {bad[0]}")
    notes = (
        [f"{counted(len(bad), 'line')} of metrics.jsonl cannot be read and are left out, first {bad[0]}"] if bad else []
    )
    notes += [f"{counted(again, 'step')} were done again by a resumed run, and count once"] if again else []
    return tuple(kept), tuple(notes)


def _record(line: str) -> dict[str, Any]:
    found = from_json(line)
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise ValueError(f"it must hold a JSON object with a step, got {line[:60]!r}")
    return found


def _json(path: Path) -> dict[str, Any]:
    return json_object(path, path.parent) if path.is_file() else {}


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
