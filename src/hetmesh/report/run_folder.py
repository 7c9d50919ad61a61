"""What a run has left in its dump folder, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hetmesh.errors import GraphError, RecipeError
from hetmesh.files import json_object
from hetmesh.records.dump_folder import ANSWERS_FILE, METRICS_FILE
from hetmesh.report.run_lines import event_lines, metrics_lines
from hetmesh.report.run_load import RunLoad, run_load
from hetmesh.report.run_story import RunStory, run_story
from hetmesh.simulate import Timeline

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
        evaluations: those that hold a `validation` instead, ascending.
        story: its starts, checkpoints and end.
        notes: what is wrong with its files, and was left out.
        answers: the `text` of held-out questions with pictures and answers, and `how` these came about; or empty.
    """

    last: Mapping[str, Any]
    summary: Mapping[str, Any]
    step: int
    timelines: Mapping[str, Timeline]
    load: RunLoad | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    story: RunStory = field(default_factory=RunStory)
    notes: tuple[str, ...] = ()
    answers: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def usual(self) -> tuple[Mapping[str, Any], ...]:
        """Steps that say how fast the run is: those since its last start, whose layout may be new; without the first of
        them, which also starts everything, where there are others."""
        since = self.story.starts[-1].step if self.story.starts else 0
        present = tuple(record for record in self.records if record["step"] > since) or self.records
        return present[1:] if len(present) > 1 and present[0]["step"] == since + 1 else present

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
    if (lines := metrics_lines(folder)) is None:
        raise RecipeError(f"{folder}: there is no metrics.jsonl in it; give a run's dump_folder")
    events, wrong = event_lines(folder)
    records = lines.steps
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
        raise RecipeError(f"{folder / METRICS_FILE}: a `load` is not as training writes it: {error!r}") from error
    story = run_story(events, (*records, *lines.evaluations), folder)
    return RunView(
        last=last,
        summary=summary,
        step=step if isinstance(step, int) else 0,
        timelines=timelines,
        load=load,
        records=records,
        evaluations=lines.evaluations,
        story=story,
        notes=(*lines.notes, *wrong),
        answers=_json(folder / ANSWERS_FILE),
    )


def _json(path: Path) -> dict[str, Any]:
    return json_object(path, path.parent) if path.is_file() else {}


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
