"""Layouts with experts spread over ranks: all that `hetmesh check` takes and no other, and the fastest of them."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.planner import PLACEMENTS, Predictor, candidates, search
from hetmesh.planner.candidates import variants
from hetmesh.planner.search import BATCHES
from hetmesh.recipe.overrides import parse_overrides
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.recipe.rewrite import rewritten
from hetmesh.report.plan_text import PlanReport, plan_text
from hetmesh.resolve.planning import plan_keys, planned_text, recipe_problem
from hetmesh.resolve.resolved import resolve
from support.often import some

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_moe.toml"
LANES = 4


def overrides(size=8, **config):
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "head_dim": 8, "moe_intermediate_size": 12, **config}
    return [
        f"--training.global_batch_size={size}",
        "--training.local_batch_size=1",
        "--parallelism.llm.expert_parallel_degree=1",
        *(f"--modules.llm.config.{key}={value}" for key, value in sizes.items()),
    ]


def problem(given, ranks, **kwargs):
    return recipe_problem(resolve(load_recipe(RECIPE, given)), machine="h100", ranks=ranks, **kwargs)


def drawn(seed):
    """Overrides and a problem of two to eight ranks: numbers and widths of experts that not every degree divides."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 4, 6, 8]))
    given = overrides(
        24,
        num_experts=int(rng.choice([2, 3, 4, 6, 8])),
        num_experts_per_tok=int(rng.integers(1, 3)),
        moe_intermediate_size=int(rng.choice([6, 8, 12])),
        hidden_size=int(rng.choice([20, 24])),
        num_attention_heads=4,
        num_key_value_heads=int(rng.choice([2, 4])),
        mlp_only_layers=rng.choice(["[]", "[0]"]),
    )
    return given, problem(given, ranks, fixed={"vision.activation_checkpoint": "none", "microbatch_size": 1})


def accepted(text, recipe, given, plan):
    """Whether `hetmesh check` takes the recipe with the layout of `plan`."""
    try:
        resolve(parse_recipe(rewritten(text, plan_keys(recipe, given, plan))))
    except RecipeError:
        return False
    return True


@pytest.mark.parametrize("seed", some((2,), range(40)))
def test_what_is_proposed_is_what_check_takes(seed):
    """Every degree for the experts of some layouts, whether or not it is a candidate; layouts as they are written."""
    given, drawn_problem = drawn(seed)
    text = rewritten(RECIPE.read_text(encoding="utf-8"), dict(parse_overrides(given)))
    recipe, rng = parse_recipe(text), np.random.default_rng(seed)
    for placement in PLACEMENTS:
        plans = list(candidates(drawn_problem, placement))
        keys = {plan.key() for plan in plans}
        spread = [plan for plan in plans if plan.modules["llm"].expert_parallel > 1]
        for plan in (part[rng.integers(len(part))] for part in (plans, spread) if part):
            written = parse_recipe(planned_text(recipe, text, (), drawn_problem, plan))
            assert written.wiring.meshes["llm"] == plan.modules["llm"].mesh
            assert written.job.description == str(plan)
            for ep in rng.permutation(range(2, drawn_problem.ranks + 1))[:3].tolist():
                own = replace(plan.modules["llm"], expert_parallel=ep)
                other = replace(plan, modules={**plan.modules, "llm": own})
                assert accepted(text, recipe, drawn_problem, other) == (other.key() in keys), other


def tight(given, share):
    """Products that take time, and so little memory that not every layout fits."""
    machine = given.machine
    rates = {kind: peak / 1000 for kind, peak in machine.peak_flops.items()}
    overheads = {"operation_overhead": 1e-7, "launch_overhead": 0.0, "context_bytes": 0, "communicator_bytes": 0}
    machine = replace(machine, peak_flops=rates, **overheads)
    given = replace(given, machine=machine)
    return given if share is None else replace(given, memory_bytes=int(search(given).fastest.peak_bytes * share))


@pytest.mark.parametrize(
    ("ranks", "share"),
    [(2, 0.7), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [(2, None), (3, None), (4, 0.6)])],
)
def test_the_optimum_is_that_of_brute_force(ranks, share):
    """Where replicated experts do not fit, those that ranks share are found."""
    fixed = {"llm.activation_checkpoint": "none", "vision.activation_checkpoint": "none"}
    sizes = {"num_experts": 16, "moe_intermediate_size": 192, "num_hidden_layers": 1}
    given = tight(problem(overrides(6, **sizes), ranks, fixed=fixed), share)
    predictor, best = Predictor(given, BATCHES, LANES), float("inf")
    plans = itertools.chain.from_iterable(candidates(given, placement) for placement in PLACEMENTS)
    for plan in (way for each in plans for way in variants(given, each)):
        try:
            found = predictor.predict(plan)
        except HetmeshError:
            continue
        best = min(best, found.step_s) if found.fits else best
    fastest = search(given).fastest
    assert fastest.step_s == pytest.approx(best, rel=1e-9), fastest.plan
    if share is not None:
        assert fastest.plan.modules["llm"].expert_parallel > 1


def test_experts_that_are_fixed_stay_and_are_told():
    given = problem(overrides(), 4, fixed={"llm.expert_parallel_degree": 4, "placement": "colocated"})
    found = search(given)
    assert found.fastest.plan.modules["llm"].expert_parallel == 4
    planned = PlanReport(given, found, 0.0)
    assert "EP 4" in plan_text(planned)
    assert "note: experts of llm: their routing" in plan_text(planned)


def test_padding_is_refused_before_the_search():
    with pytest.raises(RecipeError, match="pack_samples = true"):
        problem([*overrides(), "--training.pack_samples=false"], 2)
