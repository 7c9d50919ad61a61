"""Figures of matplotlib, which is optional: made, and written to a file that the user names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError

PIXELS_PER_INCH = 150


def new_figure(size: tuple[float, float], otherwise: str = "leave out --png") -> Any:
    """An empty figure.

    Args:
        size: width and height in inches.
        otherwise: what to do without matplotlib, the end of the message.

    Raises:
        RecipeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RecipeError(f"a picture needs matplotlib: pip install 'hetmesh[report]', or {otherwise}") from error
    return Figure(figsize=size, dpi=PIXELS_PER_INCH, layout="constrained")


def save_figure(figure: Any, path: Path, form: str) -> None:
    """Write `figure` to `path`, the value of `--png` and the like.

    Args:
        form: `png` or `svg`.

    Raises:
        RecipeError: it cannot be written there.
    """
    try:
        figure.savefig(path, format=form)
    except (OSError, ValueError) as error:  # a name may hold a null byte
        reason = error.strerror if isinstance(error, OSError) else None
        raise RecipeError(f"--png {str(path)!r}: cannot be written: {(reason or str(error)).lower()}") from error
