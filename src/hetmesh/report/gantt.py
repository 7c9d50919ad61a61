"""Timelines as a Gantt picture, PNG or SVG: a line per track, several timelines on one axis. Needs matplotlib."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hetmesh.errors import UsageError
from hetmesh.report.figures import gap_colour, new_figure, plain, save_figure
from hetmesh.report.timeline_text import headline, track_label
from hetmesh.simulate import Timeline, bubble_spans, bubbles
from hetmesh.simulate.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    OPTIMIZER,
    REDUCE,
    Spans,
)

HUES = (0.58, 0.08, 0.36, 0.92, 0.50, 0.15, 0.75, 0.0)
"""Of microbatches, in turns; neighbours are far apart."""
LOOKS = {
    FORWARD: ("forward", 0.84, None),
    BACKWARD: ("backward", 0.50, None),
    BACKWARD_INPUT: ("backward, input", 0.62, None),
    BACKWARD_WEIGHT: ("backward, weights", 0.38, "/////"),
}
"""Kind -> its name, lightness and hatch."""
BUBBLES = {
    "dp_gather": ("waiting: gather", "#e1873c52"),
    "dp_scatter": ("waiting: reduction", "#de535352"),
    "pp_warmup": ("waiting: warm-up", "#5f91cc33"),
    "pp_cooldown": ("waiting: cool-down", "#61b45433"),
    "pp_other": ("waiting: other", "#8f8f8f2b"),
}
"""Class of bubbles -> its name and colour, translucent: pale on light and on dark."""
OPTIMIZER_COLOUR, REDUCE_COLOUR = "#777777", "#cc3311"
THIN = ((OPTIMIZER, OPTIMIZER_COLOUR, -0.38, 0.76), (REDUCE, REDUCE_COLOUR, 0.38, 0.08))
"""The optimizer as a box, reductions as a line at the foot of the track: they may run beside other work."""
WIDTH_INCHES, ROW_INCHES = 14.0, 0.42
MAX_TRACKS = 32  # per timeline; of more, as many are drawn, evenly spaced
MAX_LABELS = 4000  # boxes with a number: text is what takes time
PLOT_SHARE = 0.78  # of the width that is left to the time axis, about


def save_gantt(timelines: Mapping[str, Timeline], path: str | Path, title: str = "") -> None:
    """Draw `timelines` (name -> timeline) under each other on one time axis, to `path` (.png or .svg). A box is work on
    one microbatch: the colour says which one, its lightness and hatch whether it is a forward or (a part of) a
    backward. Modules other than the last one of the graph have lower boxes. Behind them the bubbles. Raises UsageError:
    matplotlib is not installed, or `path` has another suffix or cannot be written."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--png {path}: the name must end in .png or .svg")
    save_figure(lambda: gantt_figure(timelines, title), path, path.suffix[1:])


def gantt_figure(timelines: Mapping[str, Timeline], title: str = "") -> Any:
    """The same as a figure."""
    shown = {name: _tracks(timeline) for name, timeline in timelines.items()}
    heights = [ROW_INCHES * max(len(tracks), 2) + 0.45 for tracks in shown.values()]
    figure = new_figure(WIDTH_INCHES, sum(heights) + 1.35 + 0.3 * bool(title))
    if title:
        figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max((timeline.makespan for timeline in timelines.values()), default=0.0) or 1.0
    for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
        _draw(ax, name, timeline, shown[name], end)
    axes[-1].set_xlabel("ms", fontsize=9)
    _legend(figure, timelines)
    return figure


def _tracks(timeline: Timeline) -> list[int]:
    count = len(timeline.tracks)
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MAX_TRACKS))})


def _draw(axes: Any, name: str, timeline: Timeline, tracks: list[int], end: float) -> None:
    stages = _StageLooks(timeline)
    labels = MAX_LABELS
    for place, track in enumerate(tracks):
        gaps = bubble_spans(timeline, track)
        for cause, (_, colour) in BUBBLES.items():
            bars = [(1e3 * start, 1e3 * (stop - start)) for found, start, stop in gaps if found == cause]
            axes.broken_barh(bars, (place - 0.44, 0.88), facecolors=colour, linewidth=0)
        spans = timeline.work.select(timeline.work.track == track)
        for kind in LOOKS:
            labels -= _boxes(axes, place, spans.select(spans.kind == kind), kind, stages, end, labels)
        for kind, colour, low, height in THIN:
            some = spans.select(spans.kind == kind)
            bars = list(zip(1e3 * some.start, 1e3 * (some.stop - some.start), strict=True))
            axes.broken_barh(bars, (place + low, height), facecolors=colour, linewidth=0)
    left_out = f" ({len(tracks)} of {len(timeline.tracks)} tracks)" if len(tracks) < len(timeline.tracks) else ""
    axes.set_title(f"{name}: {headline(timeline)}{left_out}", fontsize=10, loc="left")
    axes.set_xlim(0, 1e3 * end)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_yticks(range(len(tracks)), [track_label(timeline, track, separator="\n") for track in tracks])
    idle, look = bubbles(timeline), {"transform": axes.get_yaxis_transform(), "fontsize": 8}
    for place, track in enumerate(tracks):
        axes.text(1.005, place, f"{idle[track].fraction:.0%}", va="center", **look)
    axes.text(1.005, -0.62, "idle", va="bottom", **look)
    plain(axes)
    axes.tick_params(labelbottom=True)
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.spines["left"].set_visible(False)


class _StageLooks:
    """How the boxes of a stage differ from those of another: height by module, a letter by its place on the rank."""

    def __init__(self, timeline: Timeline) -> None:
        stages = [name for name in timeline.targets if "->" not in name]
        module = {name: name.rpartition(".")[0] for name in stages}
        last = module[stages[-1]] if stages else ""
        self.height = [0.76 if module[name] == last else 0.46 for name in stages]
        self.letter = [""] * len(stages)
        for held in timeline.holds:
            for name in held:
                same = [other for other in held if module[other] == module[name]]
                if len(same) > 1:
                    self.letter[stages.index(name)] = chr(ord("a") + same.index(name) % 26)


def _boxes(axes: Any, place: int, spans: Spans, kind: int, stages: _StageLooks, end: float, labels: int) -> int:
    """Draw the spans of one kind; returns how many of them got a number, at most `labels`."""
    from matplotlib.collections import PolyCollection

    if not len(spans):
        return 0
    _, lightness, hatch = LOOKS[kind]
    columns = [c.tolist() for c in (spans.target, spans.microbatch, 1e3 * spans.start, 1e3 * spans.stop)]
    corners, colours, written = [], [], 0
    inches_per_ms = WIDTH_INCHES * PLOT_SHARE / (1e3 * end)
    for target, m, start, stop in zip(*columns, strict=True):
        low, high = place - stages.height[target] / 2, place + stages.height[target] / 2
        corners.append([(start, low), (start, high), (stop, high), (stop, low)])
        colours.append(_colour(m, lightness))
        text = f"{m}{stages.letter[target]}"
        if written < labels and (stop - start) * inches_per_ms > 0.035 + 0.06 * len(text):
            # a box of its colour keeps the number readable on a hatch
            back = {"facecolor": colours[-1], "edgecolor": "none", "pad": 0.6} if hatch else None
            ink = "black" if lightness > 0.45 else "white"
            axes.text((start + stop) / 2, place, text, ha="center", va="center", fontsize=7, color=ink, bbox=back)
            written += 1
    boxes = PolyCollection(corners, facecolors=colours, edgecolors=gap_colour(), linewidths=0.4, hatch=hatch)
    axes.add_collection(boxes, autolim=False)
    return written


def _colour(microbatch: int, lightness: float) -> tuple[float, float, float]:
    return colorsys.hls_to_rgb(HUES[microbatch % len(HUES)], lightness, 0.62)


def _legend(figure: Any, timelines: Mapping[str, Timeline]) -> None:
    from matplotlib.patches import Patch

    kinds = {KINDS[kind] for t in timelines.values() for kind in np.unique(t.work.kind).tolist()}
    gaps = {found for t in timelines.values() for track in _tracks(t) for found, _, _ in bubble_spans(t, track)}
    looks = [look for kind, look in LOOKS.items() if KINDS[kind] in kinds]
    colours: dict[str, Any] = {"edgecolor": gap_colour()}
    entries = [Patch(facecolor=_colour(0, light), hatch=hatch, label=name, **colours) for name, light, hatch in looks]
    thin = (("OPTIMIZER", OPTIMIZER_COLOUR, "optimizer"), ("REDUCE", REDUCE_COLOUR, "reduction (foot of a track)"))
    entries += [Patch(color=colour, label=label) for kind, colour, label in thin if kind in kinds]
    entries += [Patch(color=colour, label=label) for kind, (label, colour) in BUBBLES.items() if kind in gaps]
    note = "number and colour: microbatch; letter: stage, where a rank has several of a module"
    if any(len({n.rpartition(".")[0] for n in t.targets if "->" not in n}) > 1 for t in timelines.values()):
        note += "; low boxes: modules before the last"
    look: dict[str, Any] = {"ncols": 6, "fontsize": 8, "title_fontsize": 8, "frameon": False}
    figure.legend(handles=entries, loc="outside lower center", title=note, **look)
