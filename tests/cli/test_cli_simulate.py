"""`hetmesh simulate` of a layout far larger than any machine here."""

import json
from pathlib import Path

import pytest

from hetmesh.cli import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "mllm_22b_175b.toml")


@pytest.mark.exhaustive
def test_a_recipe_of_3072_ranks_is_checked_and_simulated(capsys):
    assert main(["check", RECIPE]) == 0
    assert "3072 ranks" in capsys.readouterr().out
    assert main(["simulate", RECIPE, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert 3.0 < whole["makespan"] < 8.0
    assert sorted(rank for row in whole["rows"] for rank in row["ranks"]) == list(range(3072))
