"""The benchmark of experts: its bound is the definition's, placements are judged by batches that they have not seen."""

import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def experts(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("benchmarks.experts")


def test_each_token_goes_once_to_each_other_rank_that_holds_one_of_its_experts(experts):
    def routed(*tokens):
        return experts.Routed((7, 5), [list(each) for each in tokens], 0, 0)

    # Experts 0 and 1 lie on rank 7, which has two tokens of its own; 2 and 3 on rank 5, which has one.
    ranks = {5: routed((0, 1)), 7: routed((2, 3), (0, 1))}
    there, back = 4 * (10 + 2) + 2 * 2, 4 * 10
    gradient_there, gradient_back = 4 * 10, 4 * (10 + 2)
    crossing = there + gradient_there, back + gradient_back
    assert experts.sent_bound(ranks, 4, 10, 2) == {5: sum(crossing), 7: sum(crossing)}
    assert experts.sent_bound({5: routed(), 7: routed((0, 3))}, 4, 10, 2) == {5: crossing[1], 7: crossing[0]}
    assert experts.sent_bound({5: routed(), 7: routed((0, 3))}, 4, 10, 0) == {5: 80, 7: 80}
    assert experts.sent_bound({5: routed((2, 3)), 7: routed((0, 1))}, 4, 10, 2) == {5: 0, 7: 0}


def test_a_placement_is_judged_by_later_batches(experts, monkeypatch):
    placed = []
    monkeypatch.setattr(experts, "place_experts", lambda loads, ranks: placed.append(loads) or (0, 3, 1, 2))
    assert experts._shares(4) * 25 == pytest.approx(np.array([12, 6, 4, 3]))
    found = experts._skew(4, 2, draws=3, choices=1000)
    assert len(placed) == 3
    assert found["least"] == pytest.approx(2 * (12 + 3) / 25)  # the most popular beside the least popular
    monkeypatch.setattr(experts, "place_experts", lambda loads, ranks: tuple(np.argsort(loads)[[0, 3, 1, 2]]))
    best = experts._skew(4, 2, draws=3, choices=1000)
    assert best["least"] < best["after"] < best["before"]


def test_sizes_out_of_reach_are_in_the_figures_of_all(experts):
    sizes = [{"after": 1.05, "least": 1.0}, {"after": 1.5, "least": 1.4}]
    of_all = {"skew_load_after_all": 1.5, "skew_least_all": 1.4, "skew_after_over_least": pytest.approx(1.5 / 1.4)}
    assert experts._of_all_sizes(sizes) == of_all
    kept = json.loads((TOOLS / "results" / "experts.json").read_text(encoding="utf-8"))
    assert kept["skew_load_after_all"] == max(each["after"] for each in (*kept["skew"], *kept["out_of_reach"]))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bytes_are_the_bound_and_skewed_loads_are_evened_out(experts, monkeypatch):
    parser = argparse.ArgumentParser()
    experts.add_arguments(parser)
    sizes = ("--features", "32", "--inner", "16", "--batch", "4", "--rounds", "2", "--steps", "1", "--draws", "3")
    result = experts.run(parser.parse_args(sizes))
    assert result["bytes_over_bound"] == result["min_bytes_over_bound"] == 1.0
    assert result["bytes_over_features"] > 1
    assert result["skew_load_after"] <= 1.15 < result["skew_load_before"]
    assert result["loss_difference"] < 1e-5
    assert len(result["ratios"]) == 2
    json.dumps(result, allow_nan=False)
    assert "out of reach" in experts.table(result)
