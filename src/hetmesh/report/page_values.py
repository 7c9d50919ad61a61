"""What the page of a run shows, as values without any behaviour of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetmesh.report.run_series import Series
from hetmesh.report.values import RecipeView
from hetmesh.simulate import Timeline


@dataclass(frozen=True)
class Tile:
    """A figure that is seen first: what it is, its value, and what to compare it with."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """What was found, what would change it, and about which share of a step that is worth: the order of advice."""

    found: str
    change: str
    share: float = 0.0


@dataclass(frozen=True)
class State:
    """How far a run came, and whether that is `"good"`, `"bad"` or, empty, neither."""

    text: str
    mood: str = ""


@dataclass(frozen=True)
class Marks:
    """What curves have in common.

    Attributes:
        first, last: steps of the run, which their axes show; both 0: those that the lines have.
        resumed: steps after which the run went on after an end.
        saved: steps of checkpoints.
    """

    first: int = 0
    last: int = 0
    resumed: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()


@dataclass(frozen=True)
class Curves:
    """Numbers over steps, as lines.

    Attributes:
        unit: of the vertical axis.
        from_zero: whether that begins at 0.
        dotted: what to compare each of `lines` with, in their order; or none.
        marks: the steps of the run, and what happened meanwhile.
    """

    caption: str
    lines: tuple[Series, ...]
    unit: str = ""
    from_zero: bool = False
    dotted: tuple[Series, ...] = ()
    marks: Marks = field(default_factory=Marks)


@dataclass(frozen=True)
class Pairs:
    """A bar predicted and one measured, per name, in `unit`; None: there was none."""

    caption: str
    rows: tuple[tuple[str, float | None, float | None], ...]
    unit: str


@dataclass(frozen=True)
class Steps:
    """Timelines of one step by name, as a Gantt picture."""

    caption: str
    timelines: Mapping[str, Timeline]


@dataclass(frozen=True)
class Ranks:
    """Modules on ranks, and what each rank holds."""

    caption: str
    view: RecipeView


@dataclass(frozen=True)
class PageTable:
    """A table, its head first; where `numbers`, all columns but the first hold such."""

    caption: str
    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True)
class PageText:
    """Text whose lines and columns stay as they are."""

    caption: str
    text: str


Picture = Curves | Pairs | Steps | Ranks


@dataclass(frozen=True)
class PageSection:
    """A part of the page.

    Attributes:
        name: its heading.
        lead: what is to be seen in it, in a sentence.
        parts: pictures and tables; none where the run did not record what they need.
        missing: what was not recorded and how to record it, a line each.
    """

    name: str
    lead: str = ""
    parts: tuple[Picture | PageTable | PageText, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPage:
    """The page of a run.

    Attributes:
        title: what was trained.
        run: its folder.
        state: how far it came.
        written: when this was made, and of what.
        facts: what it was, a phrase each.
        notes: what is wrong with the folder's files.
        recipe: its keys with other values than their defaults, as TOML; empty: not known.
    """

    title: str
    run: str
    state: State
    facts: tuple[str, ...]
    tiles: tuple[Tile, ...]
    advice: tuple[Advice, ...]
    sections: tuple[PageSection, ...]
    notes: tuple[str, ...] = ()
    recipe: str = ""
    written: str = ""
