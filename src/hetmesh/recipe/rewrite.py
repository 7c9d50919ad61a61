"""Recipes as text: that of one with other values for some keys, comments and all, or of its values alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tomli
import tomlkit
from tomlkit.exceptions import TOMLKitError

from hetmesh.errors import RecipeError
from hetmesh.recipe.hf_path import expand_hf_path
from hetmesh.recipe.overrides import apply_override
from hetmesh.recipe.recipe import Recipe

HEADER = (
    "# Written anew, without comments: the recipe has inline tables or dotted keys where tables are needed now.\n\n"
)
"""How a recipe begins whose text could not be kept."""


def rewritten(text: str, values: Mapping[tuple[str, ...], Any]) -> str:
    """`text` with the values of some keys set, and its line ends. `values`: by path, e.g. `("training", "steps")`; in
    arrays by number, e.g. `("boundaries", "0", "at")`. A table takes the place of the whole table that is there. Raises
    RecipeError: the text is no TOML, or a path leads through something that is no table."""
    try:
        wanted: dict[str, Any] = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise RecipeError(f"the recipe cannot be rewritten: {error}") from error
    directory = expand_hf_path(wanted).get("modules", {})  # a table of a module that only a directory names is new
    for path, value in values.items():
        if path[0] == "modules" and path[1] in directory:
            modules = wanted.get("modules", {})
            wanted = {**wanted, "modules": {**modules, path[1]: modules.get(path[1], {})}}
        wanted = apply_override(wanted, path, value)
    try:
        found = _edited(text.replace("\r\n", "\n"), values)
        same = tomli.loads(found) == wanted
    except (TOMLKitError, tomli.TOMLDecodeError, TypeError, AttributeError, ValueError):
        same = False
    if not same:
        found = HEADER + tomlkit.dumps(wanted)
    return found.replace("\n", "\r\n") if "\r\n" in text else found


def _edited(text: str, values: Mapping[tuple[str, ...], Any]) -> str:
    document = tomlkit.parse(text)
    for path, value in values.items():
        table: Any = document
        for key in path[:-1]:
            if not isinstance(table, list) and key not in table:
                table[key] = tomlkit.table()
            table = table[int(key) if isinstance(table, list) else key]
        last = int(path[-1]) if isinstance(table, list) else path[-1]
        table[last] = _tables(value) if isinstance(value, Mapping) else value
    return tomlkit.dumps(document)


def _tables(values: Mapping[str, Any]) -> Any:
    """A table with tables inside, each under a header of its own."""
    table = tomlkit.table()
    for key, value in values.items():
        table[key] = _tables(value) if isinstance(value, Mapping) else value
    table.add(tomlkit.nl())
    return table


def recipe_toml(recipe: Recipe, sections: Collection[str] | None = None) -> str:
    """A recipe's keys with other values than their defaults, in these sections or all, as TOML that says the same."""
    include = None if sections is None else set(sections)
    tables: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=include)
    parallelism = tables.get("parallelism", {})
    if "modules" in parallelism:  # as a recipe is written
        tables["parallelism"] = parallelism | parallelism["modules"]
        del tables["parallelism"]["modules"]
    return tomlkit.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value
