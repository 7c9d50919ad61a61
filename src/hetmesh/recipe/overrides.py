"""`--section.key value` overrides of a recipe, as given on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli

from hetmesh.errors import RecipeError
from hetmesh.recipe.keys import SECTIONS, is_flag, is_list, unknown

FREE_TABLES = ("modules", "data")
"""Tables with keys of models and sources, which are taken as they are."""


def parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """`("--training.steps", "20", "--modules.llm.lr=1e-3")` as (path, value) pairs, e.g. `(("training", "steps"), 20)`.

    As torchtitan's command line takes them, too: `--checkpoint.enable` and `--checkpoint.no-enable` without a value,
    `-` for `_`, lists of names as `a,b`. Raises RecipeError: an argument is no `--section.key`, or has no value.
    """
    pending = list(reversed(arguments))
    while pending:
        argument = pending.pop()
        name, equals, text = argument.partition("=")
        path = tuple(name.removeprefix("--").split("."))
        if not name.startswith("--") or len(path) < 2 or not all(path):
            raise RecipeError(f"override {argument!r}: write overrides as --section.key value")
        if path[0] in SECTIONS and path[0] not in FREE_TABLES:
            path = tuple(part.replace("-", "_") for part in path)
        if not equals:
            if not pending or pending[-1].startswith("--"):
                if (flag := _flag(path)) is not None:
                    yield flag
                    continue
                raise RecipeError(f"override {argument!r}: give it a value: {argument} VALUE")
            text = pending.pop()
        value = parse_value(text)
        yield path, value.split(",") if isinstance(value, str) and is_list(*path[:2]) and len(path) == 2 else value


def _flag(path: tuple[str, ...]) -> tuple[tuple[str, ...], bool] | None:
    """What a key without a value says; None where it needs one."""
    section, key = path[0], ".".join(path[1:])
    if is_flag(section, key):
        return path, True
    off = (*path[:-1], path[-1].removeprefix("no_"))
    return (off, False) if off != path and is_flag(section, ".".join(off[1:])) else None


def parse_value(text: str) -> Any:
    """`text` as a TOML value, or as the plain string that it is where it is none: `20`, `true`, `[0, 1]`, `0-1`."""
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also numbers of thousands of digits, and lists in lists
        return text
    return table["value"] if len(table) == 1 else text


def apply_override(raw: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """`raw` with the key at `path` set to `value`; tables on the way are made where they are missing.
    Raises RecipeError: `path` leads through a module or boundary that the recipe does not have, or through a value."""
    if path[0] == "modules" and path[1] not in raw.get("modules", {}):
        raise RecipeError(f"--{'.'.join(path)}: {unknown('module', path[1], raw.get('modules', {}))}")
    return _set(raw, path, value, ".".join(path))


def _set(node: Any, path: Sequence[str], value: Any, name: str) -> Any:
    if not path:
        return value
    key, *rest = path
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            raise RecipeError(f"--{name}: {key!r} is no index into an array of {len(node)}; write 0..{len(node) - 1}")
        return [_set(item, rest, value, name) if i == int(key) else item for i, item in enumerate(node)]
    if not isinstance(node, Mapping):
        raise RecipeError(f"--{name}: {key!r} lies inside {node!r}, which is a value and not a table")
    return {**node, key: _set(node.get(key, {}), rest, value, name)}
