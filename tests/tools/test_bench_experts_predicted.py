"""The benchmark of predicted experts: its recipe is what it says, and a run of a small one has its keys."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.exhaustive
def test_a_small_run_has_the_keys(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    bench = importlib.import_module("benchmarks.experts_predicted")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    given = [
        "--rounds",
        "1",
        "--seconds",
        "0",
        "--features",
        "32",
        "--inner",
        "16",
        "--layers",
        "1",
        "--microbatch",
        "2",
    ]
    args = parser.parse_args(given)
    recipe = bench.recipe_of(args)
    assert recipe.world_size == 2
    assert {name: mesh.axes for name, mesh in recipe.wiring.meshes.items()}["llm"] == ("ep",)
    assert recipe.batch.num_microbatches == 4
    result = bench.run(args)
    assert result["predicted_ms"] > 0 < result["measured_ms"]
    assert result["predicted_memory_error"] < 0.2
    assert result["experts_max_over_mean"] >= 1
    assert "predicted" in bench.table(result)
    json.dumps(result, allow_nan=False)
