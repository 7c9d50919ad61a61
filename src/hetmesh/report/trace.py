"""Timelines as a trace for chrome://tracing or ui.perfetto.dev (Trace Event Format, JSON object form)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.files import to_json
from hetmesh.report.gantt_text import track_label
from hetmesh.simulate import Span, Timeline

THREADS = ("compute", "transfers", "reductions")
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
    """Write the trace of `timelines` to `path`.

    Raises:
        RecipeError: `path` cannot be written.
    """
    try:
        Path(path).write_text(to_json(trace(timelines)), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--trace {path}: cannot be written: {(error.strerror or str(error)).lower()}") from error


def _events(name: str, timeline: Timeline, offset: int) -> Iterator[dict[str, Any]]:
    pids = [ranks[0] + offset for ranks in timeline.tracks]
    for track, pid in enumerate(pids):
        label = f"{name} {track_label(timeline, track)}".strip()
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, thread in enumerate(THREADS):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
    for span in timeline.spans():
        yield _event(span, pids[span.track], 2 if span.kind == "REDUCE" else 0)
    for span in timeline.spans(transfers=True):
        yield _event(span, pids[span.track], 1)


def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": 1e6 * span.start,
        "dur": 1e6 * (span.stop - span.start),
        "args": {"microbatch": span.microbatch} | ({"to": span.to} if span.to != span.microbatch else {}),
    }
