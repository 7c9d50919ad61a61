"""Timelines as text: a Gantt chart of characters, tables of bubbles and memory per track and of predicted and measured
seconds per module and kind of action, and a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetmesh.errors import UsageError
from hetmesh.files import to_json
from hetmesh.formatting import ranks_text, table
from hetmesh.records.metrics import amount
from hetmesh.simulate import CLASSES, Span, Timeline, average_bubbles, bubble_spans, bubbles
from hetmesh.simulate.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, OPTIMIZER, Spans

LEGEND = (
    "0-9 forward and A-J backward of microbatch 0-9 (then from 0 again), w weights' part of a backward, o optimizer, "
    "g gather, r reduction, · waiting"
)
_BUBBLE_MARKS = {"dp_gather": "g", "dp_scatter": "r", "pp_warmup": " ", "pp_cooldown": " ", "pp_other": "·"}
_BACKWARD_MARKS = "ABCDEFGHIJ"
_MARKS = {FORWARD: "0123456789", BACKWARD: _BACKWARD_MARKS, BACKWARD_INPUT: _BACKWARD_MARKS}
_MARKS |= {BACKWARD_WEIGHT: "w", OPTIMIZER: "o"}
IN_COLLECTIVES = "in collectives"
MAX_TRACKS = 32  # lines
MAX_NAMES = 3  # stages in a track's label
MAX_RUNS = 4  # of ranks

HEADS = tuple("in-layers" if name == "tp" else name.replace("_", "-") for name in CLASSES)
"""Classes of bubbles in a table's head; collectives inside layers are FSDP's, CP's and EP's too."""


def headline(timeline: Timeline) -> str:
    """The step's time and the share that the average rank does not compute."""
    return f"{1e3 * timeline.makespan:,.4g} ms, {average_bubbles(timeline).fraction:.1%} idle"


def hidden_text(timeline: Timeline) -> str:
    """How much of the collectives inside layers is used."""
    hidden = 1e3 * sum(timeline.hidden) / max(len(timeline.hidden), 1)
    return f"{hidden:,.4g} ms in collectives, {timeline.hidden_share:.0%} of the time in these, on the mean rank"


def track_label(timeline: Timeline, track: int, separator: str = "  ") -> str:
    """`"ranks 0-3  vision.0, llm.1"`."""
    ranks, held = timeline.tracks[track], timeline.holds[track]
    names = ", ".join(held[:MAX_NAMES]) + (f", {len(held) - MAX_NAMES} more" if len(held) > MAX_NAMES else "")
    runs = ranks_text(ranks).split(",")
    text = ",".join(runs[:MAX_RUNS]) + (f",... ({len(ranks)} of them)" if len(runs) > MAX_RUNS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{separator}{names}"


def gantt_text(timeline: Timeline, width: int = 100, seconds: float | None = None) -> str:
    """One line per track; every character is what takes most of its share of the step. A whole line stands for
    `seconds`, at least the step, to compare steps; None: the step."""
    tracks = range(min(len(timeline.tracks), MAX_TRACKS))
    labels = [track_label(timeline, track) for track in tracks]
    margin = min(max(map(len, labels), default=0), width // 3)
    columns = max(width - margin - 4, 10)
    if seconds and timeline.makespan:
        columns = max(round(columns * timeline.makespan / seconds), 1)
    lines = []
    for track, label in enumerate(labels):
        own, beside = (some.select(some.track == track) for some in (timeline.work, timeline.side or timeline.work))
        lines.append(f"{label[:margin]:<{margin}} |{_line(timeline, own, bubble_spans(timeline, track), columns)}|")
        if timeline.side and len(beside):
            lines.append(f"{IN_COLLECTIVES[:margin]:>{margin}} |{_line(timeline, beside, (), columns)}|")
    if len(timeline.tracks) > len(tracks):
        lines.append(f"and {len(timeline.tracks) - len(tracks)} tracks more")
    step = f"{1e3 * timeline.makespan / columns:.3g} ms"
    return "\n".join([*(line.rstrip() for line in lines), f"one character is {step}: {LEGEND}"])


def _line(timeline: Timeline, spans: Spans, gaps: Iterable[tuple[str, float, float]], columns: int) -> str:
    share = timeline.makespan / columns
    if not share:
        return " " * columns
    pieces = [(_BUBBLE_MARKS[kind], start, stop) for kind, start, stop in gaps]
    columns_of = (spans.kind, spans.microbatch, spans.start, spans.stop)
    for kind, m, start, stop in zip(*(c.tolist() for c in columns_of), strict=True):
        if marks := _MARKS.get(kind, ""):
            pieces.append((marks[m % len(marks)], start, stop))
    most, mark = np.zeros(columns), [" "] * columns
    for text, start, stop in pieces:
        for i in range(max(int(start / share), 0), min(int(stop / share) + 1, columns)):
            covered = min(stop, (i + 1) * share) - max(start, i * share)
            if covered > most[i] + 1e-9 * share:
                most[i], mark[i] = covered, text
    return "".join(mark)


def bubble_table(timeline: Timeline) -> str:
    """Per track: share of the step that it computes and of each class of bubbles, and peak memory."""
    return "\n".join(table(bubble_rows(timeline), numbers=True))


def bubble_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """The cells of that table, its head first."""
    total = timeline.makespan or 1.0
    tracks = enumerate(bubbles(timeline)[:MAX_TRACKS])
    shown = [(track_label(timeline, i), idle, timeline.peak_bytes[i]) for i, idle in tracks]
    shown.append(("all", average_bubbles(timeline), max(timeline.peak_bytes, default=0)))
    rows = [("", "compute", *HEADS, "peak")]
    for label, idle, peak in shown:
        seconds = (idle.compute, *(getattr(idle, name) for name in CLASSES))
        shares = (f"{s / total:.1%}" if s else "-" for s in seconds)
        rows.append((label, *shares, f"{amount(peak)}B" if peak else "?"))
    return rows


KIND_WORDS: Mapping[str, str] = {
    "GATHER": "gather parameters",
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "REDUCE": "sum gradients",
    "SEND": "transfer",
    "OPTIMIZER": "optimizer",
}
"""Kinds of spans, in the order of a table, and what they are called in it."""


@dataclass(frozen=True)
class ActionTime:
    """One kind of action of one module.

    Attributes:
        module: its name; of a transfer both, `"vision->llm"`; empty for the optimizer, whose work is of all.
        predicted, measured: seconds in the step, mean over the ranks that did any; None where there was none.
        predicted_count, measured_count: how many there were, on the mean rank.
    """

    module: str
    kind: str
    predicted: float | None
    measured: float | None
    predicted_count: float = 0.0
    measured_count: float = 0.0

    @property
    def label(self) -> str:
        """`"llm forward"`."""
        return f"{self.module} {KIND_WORDS.get(self.kind, '')}".strip()

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


def action_times(timelines: Mapping[str, Timeline]) -> tuple[ActionTime, ...]:
    """Of the timelines `predicted` and `measured`, as far as they are there; modules in their order.

    A measured transfer lasts from the first SEND of its sources to its arrival at who waits for it, so that it is the
    longer the later that rank looks; a predicted one ends when it is there. What FSDP gathers is measured as part of
    forwards, but for the predicted first gather.
    """
    sums = {name: _sums(timeline) for name, timeline in timelines.items()}
    predicted, measured = (sums.get(name, {}) for name in ("predicted", "measured"))
    modules, kinds = list(dict.fromkeys(module for module, _ in (*predicted, *measured))), list(KIND_WORDS)
    last = {"SEND": 1, "OPTIMIZER": 2}  # transfers, then the optimizer
    keys = sorted({*predicted, *measured}, key=lambda k: (last.get(k[1], 0), modules.index(k[0]), kinds.index(k[1])))
    none: tuple[float | None, float] = (None, 0.0)
    times = []
    for key in keys:
        (before, expected), (seconds, count) = predicted.get(key, none), measured.get(key, none)
        times.append(ActionTime(*key, before, seconds, expected, count))
    return tuple(times)


def _sums(timeline: Timeline) -> dict[tuple[str, str], tuple[float | None, float]]:
    """(module, kind) -> seconds and number of actions, on the mean rank of those that have any."""
    spans: dict[tuple[str, str], list[Span]] = {}
    for span in (*timeline.spans(), *timeline.spans(transfers=True)):
        spans.setdefault((_module(span.target), span.kind), []).append(span)
    size = [len(ranks) for ranks in timeline.tracks]
    sums: dict[tuple[str, str], tuple[float | None, float]] = {}
    for key, some in spans.items():
        if ranks := sum(size[track] for track in {span.track for span in some}):
            seconds = sum(size[span.track] * (span.stop - span.start) for span in some)
            sums[key] = seconds / ranks, sum(size[span.track] for span in some) / ranks
    return sums


def _module(target: str) -> str:
    """`"llm.0"` -> `"llm"`; of an edge both ends, or one where they are stages of one module."""
    ends = [end.rpartition(".")[0] for end in target.split("->")] if target else [""]
    return ends[0] if len(set(ends)) == 1 else "->".join(ends)


def action_table(timelines: Mapping[str, Timeline]) -> str:
    """The same as lines of text: milliseconds of a step on the mean rank."""
    return "\n".join(table(list(action_rows(timelines)), numbers=True))


def action_rows(timelines: Mapping[str, Timeline]) -> Iterator[tuple[str, ...]]:
    """The cells of that table, its head first."""
    yield ("ms on the mean rank", "predicted", "measured", "error", "actions")
    makespan = {name: timeline.makespan for name, timeline in timelines.items()}
    step = ActionTime("step", "", makespan.get("predicted"), makespan.get("measured"))
    for time in (*action_times(timelines), step):
        milliseconds = ("-" if x is None else f"{1e3 * x:.2f}" for x in (time.predicted, time.measured))
        error = "-" if time.error is None else f"{100 * time.error:+.0f}%"
        count = time.measured_count if time.measured is not None else time.predicted_count
        yield (time.label, *milliseconds, error, f"{count:g}" if time.kind else "")


THREADS = ("compute", "transfers", "reductions", IN_COLLECTIVES)
"""Of each process. Reductions run beside compute, and spans of one thread must not overlap."""


def trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace of some timelines by name. A process is a rank (of a class of ranks, the first), times are in
    microseconds. The ranks of a second timeline are numbered after those of the first."""
    events: list[dict[str, Any]] = []
    offset = 0
    for name, timeline in timelines.items():
        events += _events(name if len(timelines) > 1 else "", timeline, offset)
        offset += max((ranks[-1] for ranks in timeline.tracks), default=-1) + 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write the trace of `timelines` to `path`. Raises UsageError: `path` cannot be written."""
    try:
        Path(path).write_text(to_json(trace(timelines)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--trace {path}: cannot be written: {(error.strerror or str(error)).lower()}") from error


def _events(name: str, timeline: Timeline, offset: int) -> Iterator[dict[str, Any]]:
    pids = [ranks[0] + offset for ranks in timeline.tracks]
    for track, pid in enumerate(pids):
        label = f"{name} {track_label(timeline, track)}".strip()
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, thread in enumerate(THREADS if timeline.side else THREADS[:-1]):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
    spans = [(span, 2 if span.kind == "REDUCE" else 0) for span in timeline.spans()]
    spans += [(span, 1) for span in timeline.spans(transfers=True)]
    spans += [(span, 3) for span in timeline.spans(side=True)]
    for span, tid in spans:
        times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.stop - span.start)}
        args = {"microbatch": span.microbatch} | ({"to": span.to} if span.to != span.microbatch else {})
        where = {"pid": pids[span.track], "tid": tid}
        yield {"ph": "X", "name": span.name, "cat": span.kind, **where, **times, "args": args}
