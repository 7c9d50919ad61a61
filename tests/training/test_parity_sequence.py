"""Sequence parallelism with every LLM of the survey that reports it: TP 2 equals transformers' own model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing.parity import compare, run_as
from support.whole_reference import whole_reference

TOOLS = Path(__file__).parents[2] / "tools"
KEPT = json.loads((TOOLS / "results" / "survey.json").read_text(encoding="utf-8"))
ROWS = {row["model_type"]: row for kind in ("image_text", "audio_text") for row in KEPT[kind]["rows"]}
ONE_HEAD = ("paligemma",)
"""Of one head of keys and values, which two ranks cannot have: `test_parity_split.py` compares a config with two."""
SHARDED = [
    name
    for name, row in ROWS.items()
    if row["result"] == "passed" and row["abilities"]["token_sharded"] is True and name not in ONE_HEAD
]
TABLES = """
[parallelism.llm]
ranks = [2, 3]
tensor_parallel_degree = 2
enable_sequence_parallel = true
"""


@pytest.mark.exhaustive  # test_parity_hybrid.py and test_parity_qwen3vl.py have one each
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_sequence_parallelism_equals_transformers_own(pool4, monkeypatch, name):
    monkeypatch.syspath_prepend(str(TOOLS))
    row = ROWS[name]
    towers = "".join(f"[parallelism.{part}]\nranks = [0, 1]\n" for part in row["parts"] if part != "llm")

    def judge(text):
        recipe = parse_recipe(text + TABLES + towers)
        ranks = pool4.run(run_as, recipe, 2, None, None, timeout=120)
        return {"result": "passed", "error": compare(whole_reference(recipe, 2), ranks, 1e-9)}

    found = importlib.import_module("surveying.one_class").survey(name, row["class"], judge)
    assert found["result"] == "passed", found.get("reason")
    assert found["abilities"]["token_sharded"] is True
