"""Figures of matplotlib, which is optional: drawn in a style, and written to the file that the user names or as SVG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetmesh.errors import UsageError

PIXELS_PER_INCH = 150
SOFT = "0.5"
"""A grey that is seen on light and on dark."""


def _colours(lines: str, gap: str, grid: str, ink: str) -> Mapping[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    cycle = f"cycler(color={lines.split()})"
    return {"axes.prop_cycle": cycle, "patch.edgecolor": gap, "grid.color": grid, **dict.fromkeys(inked, ink)}


STYLES: Mapping[str, Mapping[str, Any]] = {  # lines: Paul Tol's bright scheme, clear to colour-blind readers too
    "light": _colours("#4477aa #ee6677 #228833 #ccbb44 #66ccee #aa3377 #bbbbbb", "#ffffff", "#d5d9df", "#1a1d21"),
    "dark": _colours("#77aadd #ff8c9b #5bbf6c #ddcc66 #7fd6f5 #dd77b3 #bbbbbb", "#16191d", "#3a414a", "#e6e9ed"),
}
"""Colours as matplotlib's settings; `patch.edgecolor` is what lies between boxes: the paper's."""
_SETTINGS = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "hetmesh"}  # names may hold dollars


def new_figure(width: float, height: float) -> Any:
    """An empty figure; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=PIXELS_PER_INCH, layout="constrained")


def save_figure(draw: Callable[[], Any], path: str | Path, form: str = "png") -> None:
    """Write the figure that `draw` makes to `path`, the value of `--png` and the like, as `png` or `svg`.
    Raises UsageError: matplotlib is not installed, or `path` cannot be written."""
    with _style("light", "a picture", "leave out --png"):
        figure = draw()
        try:
            figure.savefig(path, format=form)
        except (OSError, ValueError) as error:  # a name may hold a null byte
            reason = error.strerror if isinstance(error, OSError) else None
            raise UsageError(f"--png {str(path)!r}: cannot be written: {(reason or str(error)).lower()}") from error


def figure_svg(draw: Callable[[], Any], style: str) -> str:
    """The figure that `draw` makes, in one of `STYLES` on no background, as SVG whose text stays text.
    Raises UsageError: matplotlib is not installed."""
    written = io.StringIO()
    with _style(style, "the page", "leave the page out with --no-html"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs that matplotlib's fonts lack: the browser's have them
        draw().savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


@contextmanager
def _style(name: str, what: str, otherwise: str) -> Iterator[None]:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(f"{what} needs matplotlib: pip install 'hetmesh[report]', or {otherwise}") from error
    settings: Any = {**_SETTINGS, **STYLES[name]}
    with matplotlib.rc_context(settings):
        yield


def plain(axes: Any, size: float = 8) -> None:
    """Small labels, and lines at the left and the foot only."""
    axes.tick_params(labelsize=size)
    axes.spines[["top", "right"]].set_visible(False)


def gap_colour() -> str:
    """What lies between boxes, in the style that is drawn in."""
    import matplotlib

    return matplotlib.rcParams["patch.edgecolor"]
