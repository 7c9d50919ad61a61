"""Timelines as text: a Gantt chart of characters, and a table of bubbles and memory per track."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hetmesh.formatting import ranks_text, table
from hetmesh.records.metrics import amount
from hetmesh.simulate import CLASSES, Timeline, average_bubbles, bubble_spans, bubbles
from hetmesh.simulate.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, OPTIMIZER

MARKS = {"dp_gather": "g", "dp_scatter": "r", "pp_warmup": " ", "pp_cooldown": " ", "pp_other": "·"}
LEGEND = (
    "0-9 forward and A-J backward of microbatch 0-9 (then from 0 again), w weights' part of a backward, o optimizer, "
    "g gather, r reduction, · waiting"
)
MOST_TRACKS = 32
MOST_NAMES = 3  # stages in a track's label
MOST_RUNS = 4  # of ranks

HEADS = tuple("in-layers" if name == "tp" else name.replace("_", "-") for name in CLASSES)
"""Classes of bubbles in a table's head; collectives inside layers are FSDP's, CP's and EP's too."""


def headline(timeline: Timeline) -> str:
    """The step's time and the share that the average rank does not compute."""
    return f"{1e3 * timeline.makespan:,.4g} ms, {average_bubbles(timeline).fraction:.1%} idle"


def track_label(timeline: Timeline, track: int, separator: str = "  ") -> str:
    """`"ranks 0-3  vision.0, llm.1"`."""
    ranks, held = timeline.tracks[track], timeline.holds[track]
    names = ", ".join(held[:MOST_NAMES]) + (f", {len(held) - MOST_NAMES} more" if len(held) > MOST_NAMES else "")
    runs = ranks_text(ranks).split(",")
    text = ",".join(runs[:MOST_RUNS]) + (f",... ({len(ranks)} of them)" if len(runs) > MOST_RUNS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{separator}{names}"


def gantt_text(timeline: Timeline, width: int = 100, seconds: float | None = None) -> str:
    """One line per track; every character is what takes most of its share of the step.

    Args:
        seconds: what a whole line stands for, at least the step: to compare steps; None: the step.
    """
    tracks = range(min(len(timeline.tracks), MOST_TRACKS))
    labels = [track_label(timeline, track) for track in tracks]
    margin = min(max(map(len, labels), default=0), width // 3)
    columns = max(width - margin - 4, 10)
    if seconds and timeline.makespan:
        columns = max(round(columns * timeline.makespan / seconds), 1)
    lines = [f"{label[:margin]:<{margin}} |{_line(timeline, track, columns)}|" for track, label in enumerate(labels)]
    if len(timeline.tracks) > len(tracks):
        lines.append(f"and {len(timeline.tracks) - len(tracks)} tracks more")
    step = f"{1e3 * timeline.makespan / columns:.3g} ms"
    return "\n".join([*(line.rstrip() for line in lines), f"one character is {step}: {LEGEND}"])


def _line(timeline: Timeline, track: int, columns: int) -> str:
    share = timeline.makespan / columns
    if not share:
        return " " * columns
    spans = timeline.work.select(timeline.work.track == track)
    pieces = [(MARKS[kind], start, stop) for kind, start, stop in bubble_spans(timeline, track)]
    columns_of = (spans.kind, spans.microbatch, spans.start, spans.stop)
    for kind, m, start, stop in zip(*(c.tolist() for c in columns_of), strict=True):
        if kind in _MARKS:
            pieces.append((_MARKS[kind][m % len(_MARKS[kind])], start, stop))
    most, mark = np.zeros(columns), [" "] * columns
    for text, start, stop in pieces:
        for i in range(max(int(start / share), 0), min(int(stop / share) + 1, columns)):
            covered = min(stop, (i + 1) * share) - max(start, i * share)
            if covered > most[i] + 1e-9 * share:
                most[i], mark[i] = covered, text
    return "".join(mark)


_MARKS = {
    FORWARD: "0123456789",
    BACKWARD: "ABCDEFGHIJ",
    BACKWARD_INPUT: "ABCDEFGHIJ",
    BACKWARD_WEIGHT: "w",
    OPTIMIZER: "o",
}


def bubble_table(timeline: Timeline) -> str:
    """Per track: share of the step that it computes and of each class of bubbles, and peak memory."""
    return "\n".join(table(bubble_rows(timeline), numbers=True))


def bubble_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """The cells of that table, its head first."""
    return [("", "compute", *HEADS, "peak"), *_table_cells(timeline)]


def _table_cells(timeline: Timeline) -> Iterator[tuple[str, ...]]:
    total = timeline.makespan or 1.0
    found = bubbles(timeline)
    shown = [(track_label(timeline, i), b, timeline.peak_bytes[i]) for i, b in enumerate(found[:MOST_TRACKS])]
    shown.append(("all", average_bubbles(timeline), max(timeline.peak_bytes, default=0)))
    for label, each, peak in shown:
        seconds = (each.compute, *(getattr(each, name) for name in CLASSES))
        memory = f"{amount(peak)}B" if peak else "?"
        yield (label, *(f"{s / total:.1%}" if s else "-" for s in seconds), memory)


def summary_json(timeline: Timeline) -> dict[str, Any]:
    """What the table says, in seconds and bytes, for `--json`."""
    average = average_bubbles(timeline)
    return {
        "makespan": timeline.makespan,
        "idle_fraction": average.fraction,
        "hidden": list(timeline.hidden),
        "average": {"compute": average.compute} | {name: getattr(average, name) for name in CLASSES},
        "rows": [
            {"ranks": list(ranks), "stages": list(held), "peak_bytes": peak, "compute": each.compute}
            | {name: getattr(each, name) for name in CLASSES}
            for ranks, held, peak, each in zip(
                timeline.tracks, timeline.holds, timeline.peak_bytes, bubbles(timeline), strict=True
            )
        ],
    }
