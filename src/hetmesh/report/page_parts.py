"""What the page of a run is made of, as values; pictures among them know how they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hetmesh.records.run_lines import Series
from hetmesh.report.figures import SOFT, new_figure, plain

SPARSE_SHARE = 0.5  # of the first line's points: a line with fewer has them marked
MAX_TRIANGLES = 40  # checkpoints that are marked
MAX_POINTS = 400  # of a line; of more, the mean of as many parts, and their range as a band


class Tile(NamedTuple):
    """A figure that is seen first: what it is, its value, and what to compare it with."""

    name: str
    value: str
    note: str = ""


class State(NamedTuple):
    """How far a run came, and whether that is `"good"`, `"bad"` or, empty, neither."""

    text: str
    mood: str = ""


class Marks(NamedTuple):
    """What curves have in common: the run's first and last step, which axes show (both 0: those that lines have), the
    steps after which it was resumed, and those of checkpoints."""

    first: int = 0
    last: int = 0
    resumed: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()


NO_MARKS = Marks()


@dataclass(frozen=True)
class Curves:
    """Numbers over steps, as lines; `dotted` is what to compare each of them with, in their order, or empty."""

    caption: str
    lines: tuple[Series, ...]
    unit: str = ""
    from_zero: bool = False
    dotted: tuple[Series, ...] = ()
    marks: Marks = NO_MARKS
    kind = "curves"

    @property
    def alt(self) -> str:
        """What it shows, for who does not see it."""
        lines = (
            f"{line.name} from {line.values[0]:.4g} at step {line.steps[0]} to {line.values[-1]:.4g} at step "
            f"{line.steps[-1]}, between {min(line.values):.4g} and {max(line.values):.4g}"
            for line in self.lines
        )
        return f"Line chart, {self.caption}: {'; '.join(lines)}"

    def figure(self) -> Any:
        """For a page."""
        figure = new_figure(4.6, 2.4)
        axes = figure.subplots()
        for i, line in enumerate(self.lines):
            steps, low, mean, high = _thinned(line)
            if len(steps) < len(line.steps):
                axes.fill_between(steps, low, high, color=f"C{i}", alpha=0.25, linewidth=0)
            few = len(steps) == 1 or (i > 0 and len(steps) < SPARSE_SHARE * len(self.lines[0].steps))
            marker = {"marker": "o", "markersize": 4} if few else {}
            axes.plot(steps, mean, color=f"C{i}", linewidth=1.6, label=line.name, **marker)
        for i, line in enumerate(self.dotted):
            steps, _, mean, _ = _thinned(line)
            axes.plot(steps, mean, color=f"C{i}", linewidth=1.4, linestyle=":")
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel(self.unit, fontsize=9)
        plain(axes, 9)
        axes.grid(axis="y", linewidth=0.6)
        marks = self.marks
        if marks.last > marks.first:
            margin = 0.03 * (marks.last - marks.first)
            axes.set_xlim(marks.first - margin, marks.last + margin)
        for step in marks.resumed:
            axes.axvline(step, color=SOFT, linewidth=1.0, linestyle="--")
        if marks.saved:
            shown = marks.saved[:: -(-len(marks.saved) // MAX_TRIANGLES)]
            foot = axes.get_xaxis_transform()
            axes.plot(shown, [0.03] * len(shown), "^", color=SOFT, markersize=5, transform=foot, clip_on=False)
        if self.from_zero:
            axes.set_ylim(0, max(max(line.values) for line in self.lines) * 1.08 or 1)
        if len(self.lines) > 1:
            figure.legend(loc="outside upper left", fontsize=9, frameon=False, ncols=3)
        return figure


def _thinned(line: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and lowest, mean and highest value of each of at most `MAX_POINTS` parts of nearly equal size."""
    steps, values = np.array(line.steps, float), np.array(line.values, float)
    starts = np.unique(np.linspace(0, len(steps), min(len(steps), MAX_POINTS), endpoint=False).astype(int))
    count = np.diff([*starts, len(steps)])
    means = np.add.reduceat(values, starts) / count
    middles = np.add.reduceat(steps, starts) / count
    return middles, np.minimum.reduceat(values, starts), means, np.maximum.reduceat(values, starts)


@dataclass(frozen=True)
class Picture:
    """Another picture: what it shows, for who does not see it, how it is drawn, and its kind: a class of page.css."""

    caption: str
    alt: str
    figure: Callable[[], Any]
    kind: str


def pairs_figure(rows: Sequence[tuple[str, float | None, float | None]], unit: str) -> Any:
    """A bar predicted and one measured, per name; None: there was none."""
    figure = new_figure(6.4, 0.42 * len(rows) + 0.9)
    axes = figure.subplots()
    places = np.arange(len(rows))
    for offset, column, name in ((-0.19, 1, "predicted"), (0.19, 2, "measured")):
        values = [row[column] for row in rows]
        if values.count(None) < len(values):
            axes.barh(places + offset, [x or 0.0 for x in values], 0.36, color=f"C{column - 1}", label=name)
    axes.set_yticks(places, [row[0] for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=9)
    plain(axes, 9)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper left", fontsize=9, frameon=False, ncols=2)
    return figure


@dataclass(frozen=True)
class PageTable:
    """A table, its head first; where `numbers`, all columns but the first hold such."""

    caption: str
    rows: Sequence[Sequence[str]]
    numbers: bool = True
    kind = "table"


@dataclass(frozen=True)
class PageText:
    """Text whose lines and columns stay as they are."""

    caption: str
    text: str
    kind = "text"


Part = Curves | Picture | PageTable | PageText


@dataclass(frozen=True)
class PageSection:
    """A part of the page: its heading, what is to be seen in it, pictures and tables (none where the run did not record
    what they need), and what was not recorded and how to record it, a line each."""

    name: str
    lead: str = ""
    parts: tuple[Part, ...] = ()
    missing: tuple[str, ...] = ()
