"""`bench.py tune`: what a search is charged with, and its row where steps take exactly what the simulator says."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from hetmesh.training.tune.findings import Finding

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("benchmarks.tune")


def test_a_short_turn_is_the_first_steps_of_the_measured_one(tune):
    whole = Finding("a", (0.2, 0.4, 0.6), {"optimizer": 0.1}, spent_s=2.0)
    runs = tune.Runs(None, None, None, None, known={"a": [whole]})
    assert runs.turn("a", 0, 1) == dataclasses.replace(whole, steps=(0.2,), spent_s=pytest.approx(1.0))
    assert runs.turn("a", 0, 3) == whole


@pytest.mark.slow
def test_steps_as_simulated_are_found_from_wrong_constants(tune, monkeypatch):
    """On a machine of which the simulator is right, at a pace that changes from turn to turn."""
    made = []

    def measured(self, layout, steps):
        guess = self.layouts.guesses(self.problem.machine, [layout], parts=True)[layout]
        made.append(layout)
        pace = 1.0 + len(made) % 3
        parts = {name: pace * seconds for name, seconds in guess.parts.items()}
        spent = pace * (steps + 1) * guess.seconds
        return Finding(layout, (pace * guess.seconds,) * steps, parts, 0, spent, pace)

    monkeypatch.setattr(tune.Runs, "measured", measured)
    row = tune.judged(tune.Case(2, 64, 2, samples=8, text=20, fixed={"microbatch_size": 2}), 0, None)
    assert row["ran"] == row["layouts"] >= 15
    assert row["within"]
    assert row["pace"] == [0.5, 1.5]
    assert row["error_after"] < 0.08 < 0.2 < row["error_before"]
