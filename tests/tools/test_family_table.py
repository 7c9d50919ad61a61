"""The table of families: it is what the code declares, and `hetmesh check` accepts and refuses accordingly."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms
from support.can_do import LLM, TOWER, YES

TOOLS = Path(__file__).parents[2] / "tools"
PAGE = Path(__file__).parents[2] / "src" / "hetmesh" / "models" / "split" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")

TRIED = {
    "TP": "[parallelism.{module}]\ntensor_parallel_degree = 2",
    "SP": "[parallelism.{module}]\ntensor_parallel_degree = 2\nenable_sequence_parallel = true",
    "FSDP": "[parallelism.{module}]\ndata_parallel_shard_degree = 2",
    "PP": "[parallelism.{module}]\npipeline_parallel_degree = 2",
    "CP": "[parallelism.{module}]\ncontext_parallel_degree = 2",
    "LoRA": "[modules.{module}.lora]\nrank = 2",
}
"""Tables of a recipe that needs a column's ability of one module."""


@pytest.fixture
def families(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("family_table")


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_the_page_has_the_table_that_the_code_declares(families, tmp_path, count):
    """Of some families by default."""
    some = random.Random(0).sample(list(families.FAMILIES.items()), count or len(families.FAMILIES))
    lines = families.table({title: families.row_of(name, tmp_path) for name, title in some}).splitlines()
    assert set(lines) <= set(families.written(TEXT).splitlines())


def cells(families):
    """Of the table: name of the tiny model, column, cell."""
    head, _, *lines = families.written(TEXT).splitlines()
    columns = [each.strip() for each in head.strip("|").split("|")][1:]
    names = {title: name for name, title in families.FAMILIES.items()}
    for line in lines:
        title, *row = (each.strip() for each in line.strip("|").split("|"))
        yield from ((names[title], column, cell) for column, cell in zip(columns, row, strict=True) if column in TRIED)


def accepted(path, column, modules):
    tables = "\n".join(TRIED[column].format(module=module) for module in modules)
    try:
        resolve(parse_recipe(tiny_vlms.recipe_text(path, tables)))
    except RecipeError:
        return False
    return True


def check(directory, name, column, cell):
    towers = tiny_vlms.TOWERS.get(name, ("vision",))
    given = [accepted(directory(name), column, modules) for modules in (("llm",), towers)]
    assert given == [cell in (YES, LLM), cell in (YES, TOWER)], f"{name}, {column}: {cell}"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_check_accepts_and_refuses_what_some_cells_say(families, directory):
    drawn = random.Random(0).sample(list(cells(families)), 6)
    for name, column, cell in [*drawn, ("llava_cohere2", "SP", TOWER)]:
        check(directory, name, column, cell)


@pytest.mark.exhaustive
def test_check_accepts_and_refuses_what_every_cell_says(families, directory):
    for name, column, cell in cells(families):
        check(directory, name, column, cell)
