"""The pictures of a run's page as inline SVG whose colours are the page's, so that they suit light and dark.

matplotlib draws with colours that stand for variables of the page's style sheet; text stays text.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from hetmesh.errors import RecipeError
from hetmesh.report.figures import new_figure
from hetmesh.report.gantt import BUBBLES, OPTIMIZER_COLOUR, gantt_figure
from hetmesh.report.page_values import Curves, Pairs, Picture, Ranks, Steps
from hetmesh.report.picture import COLOURS, draw_grid, draw_memory, picture_width
from hetmesh.report.run_series import Series

INK, GRID, SOFT = "#010203", "#010204", "#555555"
VARIABLES: Mapping[str, str] = {
    INK: "var(--ink)",
    GRID: "var(--line)",
    SOFT: "var(--soft)",
    OPTIMIZER_COLOUR: "var(--optimizer)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)},
    **{colour: f"var(--{cause.replace('_', '-')})" for cause, (_, colour) in BUBBLES.items()},
}
"""Colour as it is drawn -> as the page has it."""
WITHOUT = "leave the page out with --no-html"
SPARSE = 0.5  # of the first line's points: a line with fewer has them marked
MOST_TRIANGLES = 40  # of more checkpoints, as many
MOST_POINTS = 400  # of a line; of more, the mean of so many parts, and their range as a band

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hetmesh",
    "text.parse_math": False,  # names may hold dollars
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def svg(picture: Picture, number: int) -> str:
    """A picture as an `<svg>` element.

    Args:
        number: of the picture on its page: what its ids begin with.

    Raises:
        RecipeError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RecipeError(f"the page needs matplotlib: pip install 'hetmesh[report]', or {WITHOUT}") from error
    written = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs that matplotlib's fonts lack: the browser's have them
        _figure(picture).savefig(written, format="svg", metadata={"Date": None})
    return _inline(written.getvalue(), f"p{number}-", describe(picture))


def _inline(text: str, prefix: str, described: str) -> str:
    """What matplotlib wrote as an element of a page: no prolog, ids of its own, the page's font and colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id|xlink:href)="(#?)', rf'\1="\2{prefix}', text)
    text = text.replace("url(#", f"url(#{prefix}")
    text = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", text)
    text = text.replace("stroke: #ffffff", "stroke: var(--paper)")
    text = re.sub("|".join(VARIABLES), lambda found: VARIABLES[found.group()], text)
    size = re.search(r'width="([\d.]+)pt"', text)
    width = float(size.group(1)) * 96 / 72 if size else 0.0
    opening, rest = text.split(">", 1)
    opening = re.sub(r' (width|height)="[\d.]+pt"', "", opening)
    label = html.escape(described, quote=True)
    return f'{opening} role="img" aria-label="{label}" style="--width: {width:.0f}px">{rest}'


def describe(picture: Picture) -> str:
    """What it shows, for who does not see it."""
    if isinstance(picture, Curves):
        lines = (
            f"{line.name} from {line.values[0]:.4g} at step {line.steps[0]} to {line.values[-1]:.4g} at step "
            f"{line.steps[-1]}, between {min(line.values):.4g} and {max(line.values):.4g}"
            for line in picture.lines
        )
        return f"Line chart, {picture.caption}: {'; '.join(lines)}"
    if isinstance(picture, Steps):
        names = " and ".join(picture.timelines)
        return f"Gantt chart of {names}, {picture.caption}; the tables before it have its figures"
    return f"{picture.caption}; the table beside it has its figures"


def _figure(picture: Picture) -> Any:
    if isinstance(picture, Curves):
        return _curves(picture)
    if isinstance(picture, Pairs):
        return _pairs(picture)
    if isinstance(picture, Steps):
        return gantt_figure(picture.timelines)
    return _ranks(picture)


def _curves(picture: Curves) -> Any:
    figure = new_figure((4.6, 2.4), WITHOUT)
    axes = figure.subplots()
    for i, line in enumerate(picture.lines):
        colour = COLOURS[i % len(COLOURS)]
        steps, low, mean, high = _thinned(line)
        if len(steps) < len(line.steps):
            axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
        few = len(steps) == 1 or (i > 0 and len(steps) < SPARSE * len(picture.lines[0].steps))
        look: dict[str, Any] = {"marker": "o", "markersize": 4} if few else {}
        axes.plot(steps, mean, color=colour, linewidth=1.6, label=line.name, **look)
    for i, line in enumerate(picture.dotted):
        steps, _, mean, _ = _thinned(line)
        axes.plot(steps, mean, color=COLOURS[i % len(COLOURS)], linewidth=1.4, linestyle=":")
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(picture.unit, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.6)
    _marks(axes, picture)
    if picture.from_zero:
        axes.set_ylim(0, max(max(line.values) for line in picture.lines) * 1.08 or 1)
    if len(picture.lines) > 1:
        figure.legend(loc="outside upper left", fontsize=9, frameon=False, ncols=3)
    return figure


def _marks(axes: Any, picture: Curves) -> None:
    """The steps of the run, and what happened meanwhile: lines over the whole height, triangles at the foot."""
    marks = picture.marks
    if marks.last > marks.first:
        margin = 0.03 * (marks.last - marks.first)
        axes.set_xlim(marks.first - margin, marks.last + margin)
    for step in marks.resumed:
        axes.axvline(step, color=SOFT, linewidth=1.0, linestyle="--")
    if saved := marks.saved:
        shown = saved[:: -(-len(saved) // MOST_TRIANGLES)]
        place = axes.get_xaxis_transform()
        axes.plot(shown, [0.03] * len(shown), "^", color=SOFT, markersize=5, transform=place, clip_on=False)


def _thinned(line: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and lowest, mean and highest value of each of at most `MOST_POINTS` parts of nearly equal size."""
    steps, values = np.array(line.steps, float), np.array(line.values, float)
    starts = np.unique(np.linspace(0, len(steps), min(len(steps), MOST_POINTS), endpoint=False).astype(int))
    count = np.diff([*starts, len(steps)])
    means = np.add.reduceat(values, starts) / count
    middles = np.add.reduceat(steps, starts) / count
    return middles, np.minimum.reduceat(values, starts), means, np.maximum.reduceat(values, starts)


def _pairs(picture: Pairs) -> Any:
    figure = new_figure((6.4, 0.42 * len(picture.rows) + 0.9), WITHOUT)
    axes = figure.subplots()
    places = np.arange(len(picture.rows))
    for offset, column, name in ((-0.19, 1, "predicted"), (0.19, 2, "measured")):
        values = [row[column] or 0.0 for row in picture.rows]
        if any(row[column] is not None for row in picture.rows):
            axes.barh(places + offset, values, 0.36, color=COLOURS[column - 1], label=name)
    axes.set_yticks(places, [row[0] for row in picture.rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(picture.unit, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper left", fontsize=9, frameon=False, ncols=2)
    return figure


def _ranks(picture: Ranks) -> Any:
    view = picture.view
    rows = 0.62 * len(view.modules) + 0.3
    figure = new_figure((picture_width(view), rows + 2.5), WITHOUT)
    grid, bars = figure.subplots(2, 1, height_ratios=[rows, 2.0])
    draw_grid(grid, view)
    draw_memory(bars, view)
    return figure
