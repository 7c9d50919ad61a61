"""The benchmark of twelve plans: they are what it says, and a run of a small one has its keys."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

from hetmesh.resolve.resolved import resolve

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("benchmarks.plans")


def test_twelve_plans_of_one_batch(plans):
    assert len(plans.PLANS) == 12
    seen = set()
    for plan in plans.PLANS:
        assert plan.microbatch not in plan.fitted
        recipe = plan.recipe(width=16, layers=4, samples=16)
        resolved = resolve(recipe)
        graph = resolved.graph
        assert recipe.world_size == 2
        assert recipe.batch.global_batch_size == 16
        assert (graph["llm"].options.activation_checkpoint == "full") == plan.recomputed
        meshes = tuple((graph[name].mesh.ranks, graph[name].mesh.axes) for name in graph.order)
        assert ("drawer" in graph.losses) == plan.draws
        seen.add((meshes, recipe.schedule, plan.microbatch, plan.recomputed))
    assert len(seen) == 12


def test_ranks_are_compared_by_their_order(plans):
    assert plans._rank_correlation([1.0, 2.0, 9.0], [10.0, 20.0, 21.0]) == pytest.approx(1)
    assert plans._rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)


@pytest.mark.exhaustive
def test_a_small_run_has_the_keys(plans):
    parser = argparse.ArgumentParser()
    plans.add_arguments(parser)
    given = ["--only", "3", "8", "11", "--rounds", "1", "--seconds", "0", "--width", "16", "--samples", "8"]
    result = plans.run(parser.parse_args(given))
    assert {"rank_correlation", "mean_error", "worst_error", "predicted_span", "rows"} <= result.keys()
    for row in result["rows"]:
        assert row["predicted_ms"] > row["optimizer_ms"] > 0 < row["measured_ms"]
        assert row["memory_error"] < 0.2
    assert "fully sharded" in plans.table(result)
    json.dumps(result, allow_nan=False)
