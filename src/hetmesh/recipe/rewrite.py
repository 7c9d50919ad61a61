"""A recipe's text with other values for some keys; everything else stays as it is written, comments too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from hetmesh.errors import RecipeError


def rewritten(text: str, values: Mapping[tuple[str, ...], Any]) -> str:
    """`text` with the values of some keys set.

    Args:
        values: by path, e.g. `("training", "steps")`. A table takes the place of the whole table that is there.

    Raises:
        RecipeError: the text is no TOML, or a path leads through something that is no table.
    """
    try:
        document = tomlkit.parse(text)
        for path, value in values.items():
            table: Any = document
            for key in path[:-1]:
                if key not in table:
                    table[key] = tomlkit.table()
                table = table[key]
            table[path[-1]] = _tables(value) if isinstance(value, Mapping) else value
        return tomlkit.dumps(document)
    except (TOMLKitError, TypeError, AttributeError) as error:
        raise RecipeError(f"the recipe cannot be rewritten: {error}") from error


def _tables(values: Mapping[str, Any]) -> Any:
    """A table with tables inside, each under a header of its own."""
    table = tomlkit.table()
    for key, value in values.items():
        table[key] = _tables(value) if isinstance(value, Mapping) else value
    table.add(tomlkit.nl())
    return table
