"""The loss that a recipe names as `"package.module:function"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetmesh._own_code import import_named
from hetmesh.errors import RecipeError
from hetmesh.recipe.sections import Loss


def named_loss(key: str, table: Loss) -> Callable[..., Any]:
    """The function that `[modules.<name>.loss] kind` names. Raises RecipeError: it cannot be imported or called."""
    try:
        found = import_named(table.kind, table.folder)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{key} = {table.kind!r}: {error}") from error
    if not callable(found):
        raise RecipeError(
            f"{key} = {table.kind!r}: must be a function (output, batch) -> summed loss, got {found!r:.60}"
        )
    return found
