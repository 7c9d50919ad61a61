"""What a run has left in its dump folder, as a value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.report.run_load import RunLoad, run_load
from hetmesh.simulate import Timeline

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
    """

    last: Mapping[str, Any]
    summary: Mapping[str, Any]
    step: int
    timelines: Mapping[str, Timeline]
    load: RunLoad | None = None

    def as_text(self) -> str:
        """Its figures, a line each."""
        figures = {key: self.last[key] for key in SHOWN if key in self.last} | dict(self.summary)
        width = max(map(len, figures), default=0)
        lines = [f"{key:<{width}}  {_shown(value)}" for key, value in figures.items()]
        return "\n".join(lines if self.load is None else [*lines, "", self.load.as_text()])


def read_run(folder: str | Path) -> RunView:
    """Read a dump folder.

    Raises:
        RecipeError: there is no run in it, or a file of it cannot be read.
    """
    folder = Path(folder)
    if (lines := metrics_lines(folder)) is None:
        raise RecipeError(f"{folder}: there is no metrics.jsonl in it; give a run's dump_folder")
    recorded = _json(folder / "timeline.json")
    timelines: dict[str, Timeline] = {
        key: Timeline.from_json(recorded[key]) for key in ("predicted", "measured") if key in recorded
    }
    last = _parsed(folder / METRICS, lines[-1]) if lines else {}
    load = run_load(records_with(folder, lines, "load"))
    return RunView(last, _json(folder / "summary.json"), recorded.get("step", 0), timelines, load)


def metrics_lines(folder: Path) -> list[str] | None:
    """The lines of a run's metrics.jsonl; None: there is no run in the folder.

    Raises:
        RecipeError: it cannot be read.
    """
    metrics = folder / METRICS
    try:
        return metrics.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # also no UTF-8, or a name that holds a null byte
        raise RecipeError(f"{metrics}: cannot be read: {error}") from error


def records_with(folder: Path, lines: Iterable[str], key: str) -> Iterator[dict[str, Any]]:
    """Those of `metrics_lines` that speak of `key`; raises RecipeError for what is no JSON object."""
    return (_parsed(folder / METRICS, line) for line in lines if f'"{key}"' in line)


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, path.read_text(encoding="utf-8")) if path.is_file() else {}


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: cannot be read: it must hold a JSON object, got {text[:60]!r}")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
