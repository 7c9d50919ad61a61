"""Make a failing recipe smaller, key by key, as long as it fails in the same way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import tomli

from support.recipes import RecipeCase, to_toml

DEGREES = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)


def simplest(case: RecipeCase, fails: Callable[[RecipeCase], bool], tries: int = 80) -> RecipeCase:
    """`case` with whatever can be left out left out. Greedy: of the smaller recipes the first that `fails` is gone on
    with, from the change that made it on."""
    position = 0
    while tries > 0:
        candidates = list(candidates_of(case))
        if position >= len(candidates):
            break
        tries -= 1
        if fails(candidates[position]):
            case = candidates[position]
        else:
            position += 1
    return case


def candidates_of(case: RecipeCase) -> Iterator[RecipeCase]:
    """Cases that are a little simpler: the run goes on as it was, or one of its two recipes is smaller."""
    if case.then:
        yield RecipeCase(case.text)
    yield from (RecipeCase(to_toml(tables), case.then) for tables in smaller(tomli.loads(case.text)))
    if case.then:
        yield from (RecipeCase(case.text, to_toml(tables)) for tables in smaller(tomli.loads(case.then)))


def smaller(tables: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Recipes that are a little simpler, the boldest changes first."""
    layouts = tables.get("parallelism", {})
    for name, table in layouts.items():
        if isinstance(table, dict):
            yield _without(tables, ("parallelism", name))
            for key in DEGREES:
                if table.get(key, 1) > 1:
                    yield _narrower(tables, name, key)
            if list(table.get("ranks", [])) != sorted(table.get("ranks", [])):
                changed = copy.deepcopy(tables)
                changed["parallelism"][name]["ranks"] = sorted(table["ranks"])
                yield changed
    for path, value in list(_leaves(tables)):
        if path[-1] not in ("model", "from", "to", "at", "ranks", "source", "steps", *DEGREES) and "kinds" not in path:
            yield _without(tables, path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and path[-1] not in ("steps", *DEGREES):
            yield _with(tables, path, value // 2)
    if tables.get("parallelism", {}).get("pipeline_parallel_schedule", "sequential") != "sequential":
        yield _with(tables, ("parallelism", "pipeline_parallel_schedule"), "sequential")


def _narrower(tables: dict[str, Any], name: str, key: str) -> dict[str, Any]:
    """Without one degree, and without the ranks that it needed."""
    changed = _without(tables, ("parallelism", name, key))
    table = changed["parallelism"][name]
    if "ranks" in table:
        table["ranks"] = table["ranks"][: math.prod(table.get(each, 1) for each in DEGREES)]
    return changed


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        elif not (isinstance(value, list) and any(isinstance(v, dict) for v in value)):
            yield (*path, key), value


def _without(tables: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(tables)
    node = changed
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return changed


def _with(tables: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(tables)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed
