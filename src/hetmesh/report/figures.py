"""Writing a figure of matplotlib to a file that the user names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetmesh.errors import RecipeError


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
