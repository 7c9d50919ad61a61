"""What a run has left in its dump folder, as a value: metrics, a recorded step, how even its microbatches were, how
it ended, and whether it still lives."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hetmesh.errors import GraphError, RecipeError, UsageError
from hetmesh.files import json_object
from hetmesh.formatting import table
from hetmesh.records.dump_folder import ANSWERS_FILE, METRICS_FILE, SUMMARY_FILE, TIMELINE_FILE
from hetmesh.records.events import ENDED, SAVED, STARTED, is_writing, now
from hetmesh.records.run_lines import Line, at, event_lines, metrics_lines, number
from hetmesh.simulate import Timeline

TEXT_KEYS = ("step", "loss", "grad_norm", "samples_per_s", "tokens_per_s", "mfu", "memory_bytes")
LOAD_KEYS = ("max_over_mean", "std_over_mean", "padding")
DRAWN = "drawn_"
"""What the key of a load begins with that holds for samples where they were drawn."""


@dataclass(frozen=True)
class Start:
    """One of the times that a run was started.

    Attributes:
        step: it went on after this one; 0: it began anew.
        wanted: steps of the whole run, as it was asked for then; 0: not known. So with host, device.
        how: it ended, a word of `records.events`; empty: not known.
        reason: of that end.
    """

    step: int
    wanted: int = 0
    host: str = ""
    device: str = ""
    how: str = ""
    reason: str = ""


@dataclass(frozen=True)
class RunStory:
    """What became of a run.

    Attributes:
        starts: in their order; none of a run that wrote no events.jsonl.
        saved: steps after which a checkpoint was complete.
        seen, read: its last sign of life, and when this was read, seconds since 1970; 0: not known.
        writing: a process has the run's folder (`records.events.is_writing`).
        here: the last start was on this host.
    """

    starts: tuple[Start, ...] = ()
    saved: tuple[int, ...] = ()
    seen: float = 0.0
    read: float = 0.0
    writing: bool | None = None
    here: bool = False

    @property
    def resumed(self) -> tuple[int, ...]:
        """Steps after which the run went on after an end."""
        return tuple(start.step for start in self.starts[1:])


@dataclass(frozen=True)
class RunLoad:
    """How even the microbatches of the logged steps were: per module and key (`LOAD_KEYS`, and those after `DRAWN`) a
    number for each step, and the samples of each step that the LLM took late."""

    steps: tuple[int, ...]
    modules: Mapping[str, Mapping[str, tuple[float, ...]]]
    deferred: tuple[float, ...]

    def means(self) -> dict[str, Any]:
        """Over all steps."""
        mean = lambda values: sum(values) / len(values)  # noqa: E731
        load = {name: {key: mean(values) for key, values in keys.items()} for name, keys in self.modules.items()}
        return {"load": load, "deferred_samples": mean(self.deferred)}

    def as_text(self) -> str:
        """The means, a line per module."""
        lines = table(self.rows(), numbers=True)
        return "\n".join([*lines, f"deferred samples per step: {self.means()['deferred_samples']:.3g}"])

    def rows(self) -> list[Sequence[str]]:
        """The cells of that table, its head first."""
        first = ("mean load of logged steps", "max / mean", "as drawn", "std / mean", "as drawn", "padding", "as drawn")
        rows: list[Sequence[str]] = [first]
        keys = [prefix + key for key in LOAD_KEYS for prefix in ("", DRAWN)]
        for name, means in self.means()["load"].items():
            rows.append([name, *(f"{means[key]:.1%}" if "padding" in key else f"{means[key]:.3f}" for key in keys)])
        return rows


@dataclass(frozen=True)
class RunView:
    """A run.

    Attributes:
        last: the last line of metrics.jsonl.
        summary: summary.json; empty while the run lasts.
        step: which step was recorded, 0 for none.
        timelines: `predicted`, where it could be, and `measured`.
        load: None where it was not reported.
        records: lines of metrics.jsonl, one per step, ascending; evaluations: those that hold a `validation` instead.
        notes: what is wrong with its files, and was left out.
        answers: the `text` of held-out questions with pictures and answers, and `how` these came about; or empty.
    """

    last: Line
    summary: Line
    step: int
    timelines: Mapping[str, Timeline]
    load: RunLoad | None = None
    records: tuple[Line, ...] = ()
    evaluations: tuple[Line, ...] = ()
    story: RunStory = field(default_factory=RunStory)
    notes: tuple[str, ...] = ()
    answers: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def usual(self) -> tuple[Line, ...]:
        """Steps that say how fast the run is: those since its last start, whose layout may be new; without the first of
        them, which also starts everything, where there are others."""
        since = self.story.starts[-1].step if self.story.starts else 0
        present = tuple(record for record in self.records if record["step"] > since) or self.records
        return present[1:] if len(present) > 1 and present[0]["step"] == since + 1 else present

    def as_text(self) -> str:
        """Its figures, a line each."""
        figures = {key: self.last[key] for key in TEXT_KEYS if key in self.last} | dict(self.summary)
        width = max(map(len, figures), default=0)
        lines = [f"{key:<{width}}  {_value_text(value)}" for key, value in figures.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines if self.load is None else [*lines, "", self.load.as_text()])


def read_run(folder: str | Path) -> RunView:
    """Read a dump folder. Raises UsageError: there is no run in it, or a file of it cannot be read."""
    folder = Path(folder)
    if (lines := metrics_lines(folder)) is None:
        raise UsageError(f"{folder}: there is no metrics.jsonl in it; give a run's dump_folder")
    events, wrong = event_lines(folder)
    recorded = _json(folder / TIMELINE_FILE)
    try:
        names = [name for name in ("predicted", "measured") if name in recorded]
        timelines: dict[str, Timeline] = {name: Timeline.from_json(recorded[name]) for name in names}
    except GraphError as error:
        raise UsageError(f"{folder / TIMELINE_FILE}: cannot be read: {error}") from error
    step = recorded.get("step")
    return RunView(
        last=lines.steps[-1] if lines.steps else {},
        summary=_json(folder / SUMMARY_FILE),
        step=step if isinstance(step, int) else 0,
        timelines=timelines,
        load=run_load(lines.steps),
        records=lines.steps,
        evaluations=lines.evaluations,
        story=run_story(events, (*lines.steps, *lines.evaluations), folder),
        notes=(*lines.notes, *wrong),
        answers=_json(folder / ANSWERS_FILE),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json_object(path, path.parent) if path.is_file() else {}
    except RecipeError as error:
        raise UsageError(str(error)) from error


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_value_text(inner)}" for key, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_load(records: Iterable[Line]) -> RunLoad | None:
    """From lines of metrics.jsonl; those without a `load` are passed over. None: there is no other."""
    logged = [record for record in records if isinstance(record.get("load"), Mapping) and record["load"]]
    names = logged[-1]["load"] if logged else ()
    keys = [prefix + key for key in LOAD_KEYS for prefix in ("", DRAWN)]
    paths = [(name, key) for name in names for key in keys]
    logged = [line for line in logged if all(number(at(line, "load", *path)) is not None for path in paths)]
    if not logged:
        return None
    modules = {name: {key: tuple(line["load"][name][key] for line in logged) for key in keys} for name in names}
    deferred = tuple(number(line.get("deferred_samples")) or 0 for line in logged)
    return RunLoad(tuple(line["step"] for line in logged), modules, deferred)


def run_story(events: Sequence[Line], lines: Iterable[Line], folder: Path) -> RunStory:
    """From the lines of events.jsonl and metrics.jsonl, and a look whether a process writes to `folder`."""
    starts: list[Start] = []
    for event in events:
        if event["event"] == STARTED:
            host, device = _word(event.get("host")), _word(event.get("device"))
            starts.append(Start(event["step"], _count(event.get("steps")), host, device))
        elif event["event"] == ENDED and starts:
            starts[-1] = replace(starts[-1], how=_word(event.get("how")), reason=_word(event.get("reason")))
    stamps = [stamp for line in (*events, *lines) if (stamp := number(line.get("timestamp"))) is not None]
    seen = max(stamps, default=0.0)
    if not seen:
        with suppress(OSError):
            seen = (folder / METRICS_FILE).stat().st_mtime
    saved = tuple(event["step"] for event in events if event["event"] == SAVED)
    here = bool(starts) and starts[-1].host == socket.gethostname()
    return RunStory(tuple(starts), saved, seen, now(), is_writing(folder), here)


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
