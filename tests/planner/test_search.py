"""The search for layouts: against brute force, within what is fixed and what fits; a few lanes stand for all."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetmesh.cli import main
from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.graph import MetaArrays
from hetmesh.planner import PLACEMENTS, LayoutPlan, ModulePlan, Predictor, candidates, search
from hetmesh.planner.layout_plan import laid_out
from hetmesh.planner.some_lanes import some_lanes
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.recipe.rewrite import rewritten
from hetmesh.training.planning import check_planned, plan_keys, recipe_problem

RECIPES = Path(__file__).parents[2] / "recipes"


def problem(ranks=4, size=16, recipe="digits", **kwargs):
    sizes = [f"--training.global_batch_size={size}", "--training.local_batch_size=1"]
    given = load_recipe(RECIPES / f"{recipe}.toml", sizes)
    return recipe_problem(given, machine="h100", ranks=ranks, **kwargs)


def alike(given):
    """The problem with samples that are all the same."""
    return replace(given, samples=MetaArrays.of([given.samples[0]] * len(given.samples)))


def brute_force(given):
    """The shortest step of all candidates, each simulated as the search does in the end."""
    predictor, best = Predictor(given, 2, 4), float("inf")
    for placement in PLACEMENTS:
        for plan in candidates(given, placement):
            try:
                found = predictor.predict(plan)
            except HetmeshError:
                continue
            if found.fits:
                best = min(best, found.step_s)
    return best


@pytest.fixture(scope="module")
def four():
    """A problem of four ranks, and what the search finds."""
    given = problem(4, 16)
    return given, search(given)


@pytest.mark.parametrize(("ranks", "size", "seed"), [(2, 4, 2), pytest.param(2, 8, 1, marks=pytest.mark.slow)])
def test_the_best_is_that_of_brute_force(ranks, size, seed):
    given = problem(ranks, size, fixed={"llm.activation_checkpoint": "none"})
    rng = np.random.default_rng(seed)
    given = replace(given, samples=given.samples.take(rng.permutation(len(given.samples))))
    found = search(given)
    assert found.fastest.step_s <= 1.02 * brute_force(given)


def test_predictions_come_in_order_and_are_deterministic(four):
    given, one = four
    two = search(given)
    for placement, best in one.best.items():
        assert [each.plan for each in best] == [each.plan for each in two.best[placement]]
        assert [each.step_s for each in best] == sorted(each.step_s for each in best)
        assert all(each.fits and each.plan.placement == placement for each in best)
    assert set(one.best) == set(PLACEMENTS)
    assert all(one.best.values())
    for placement in PLACEMENTS:
        ranks = [own.ranks for own in one.best[placement][0].plan.modules.values()]
        if placement == "disjoint":
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranks))
        else:
            assert ranks[-1] == (0, 4)


def test_what_is_fixed_stays():
    fixed = {"llm.tensor_parallel_degree": 2, "vision.activation_checkpoint": "full", "microbatch_size": 2}
    found = search(problem(4, 16, fixed=fixed))
    for best in found.best.values():
        for each in best:
            assert each.plan.modules["llm"].degree("tp") == 2
            assert each.plan.modules["vision"].activation_checkpoint == "full"
            assert each.plan.microbatch_size == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llm.tensor", 2, r"--fix llm\.tensor: valid are placement, .* MODULE\.KEY"),
        ("projector.tensor_parallel_degree", 2, r"MODULE of \['vision', 'llm'\]"),
        ("placement", "anywhere", r"--fix placement: 'anywhere' is not valid"),
        ("llm.tensor_parallel_degree", 0, r"--fix llm\.tensor_parallel_degree: 0 is not valid"),
    ],
)
def test_wishes_that_cannot_be_are_named(key, value, said):
    with pytest.raises(RecipeError, match=said):
        problem(fixed={key: value})


def test_nothing_that_does_not_fit_is_proposed(four):
    given, whole = four
    largest = whole.fastest.peak_bytes
    found = search(replace(given, memory_bytes=largest - 1))
    assert all(each.peak_bytes < largest for best in found.best.values() for each in best)
    assert search(replace(given, memory_bytes=1)).fastest is None


@pytest.mark.parametrize("placement", ["colocated", "disjoint"])
def test_a_few_lanes_stand_for_all_where_samples_are_alike(placement):
    given = alike(problem(8, 32))
    own = {"colocated": ((0, 8), (0, 8)), "disjoint": ((0, 4), (4, 8))}[placement]
    vision = ModulePlan(own[0], (1, own[0][1] - own[0][0], 1, 1, 1))
    llm = ModulePlan(own[1], (1, 1, (own[1][1] - own[1][0]) // 2, 1, 2))
    plan = LayoutPlan(placement, {"vision": vision, "llm": llm}, "sequential", 2)
    graph, share = some_lanes(laid_out(given, plan))
    assert share < 1
    assert set(graph.ranks) < set(range(8))
    few, all_of_them = (Predictor(given, lanes=lanes).predict(plan) for lanes in (1, 100))
    assert few.step_s == pytest.approx(all_of_them.step_s, rel=1e-9)
    assert few.peak_bytes == all_of_them.peak_bytes


def test_the_recipe_that_is_written_has_the_layout_and_keeps_what_else_was_said(four):
    path = RECIPES / "digits.toml"
    before = path.read_text(encoding="utf-8")
    for best in four[1].best.values():
        plan = best[0].plan
        text = rewritten(before, plan_keys(load_recipe(path), plan, 16))
        check_planned(text, plan)
        after = parse_recipe(text)
        assert after.batch.global_batch_size == 16
        assert after.batch.microbatch_size == plan.microbatch_size
        assert after.schedule == plan.schedule
        assert after.optimizer == load_recipe(path).optimizer
        assert "# --- Modules: what is trained." in text


def test_the_command_prints_and_writes(tmp_path, capsys):
    keys = ["--machine", "h100", "--ranks", "2", "--fix", "placement=disjoint", "--fix", "schedule=1f1b"]
    sizes = ["--training.global_batch_size", "4", "--training.local_batch_size", "1"]
    target = tmp_path / "planned.toml"
    assert main(["plan", str(RECIPES / "digits.toml"), *keys, "--write", str(target), *sizes]) == 0
    out = capsys.readouterr().out
    assert "2 ranks of h100, 4 samples per step, at most 72.0 GB on a rank" in out
    assert "disjoint: the fastest" in out
    assert all(len(line) <= 120 for line in out.splitlines()[:-1])
    written = load_recipe(target)
    assert written.schedule == "1f1b"
    assert written.world_size == 2
    assert main(["plan", str(RECIPES / "digits.toml"), *keys, "--json", "--memory", "1e-9", *sizes]) == 1
    assert json.loads(capsys.readouterr().out)["plans"] == []
    assert main(["plan", str(RECIPES / "digits.toml"), "--ranks", "0"]) == 2
    assert "--ranks 0: must be above 0" in capsys.readouterr().err
