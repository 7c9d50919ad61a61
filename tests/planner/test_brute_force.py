"""What a search finds against brute force: the simulation of every candidate, on small random problems."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetmesh.errors import HetmeshError
from hetmesh.planner import PLACEMENTS, Predictor, candidates, search
from hetmesh.planner.candidates import module_plans, variants, with_schedules
from hetmesh.planner.search import BATCHES
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.planning import recipe_problem
from hetmesh.resolve.resolved import resolve
from support.often import some

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
LANES = 4
OTHERS = sorted({*range(4, 50)} - {36, 45})
MORE_RANKS = [pytest.param(ranks, ranks, marks=pytest.mark.exhaustive) for ranks in (5, 6)]


def random_problem(seed):
    """Two or three modules on two to four ranks, of random sizes, samples, links, wishes and memory."""
    rng = np.random.default_rng(seed)
    layers, wide, size = rng.integers(1, 5, 2), 32 * rng.integers(1, 9, 2), int(rng.choice([2, 4, 6, 8]))
    given = load_recipe(
        RECIPES / rng.choice(["digits.toml", "digits_colocated.toml"]),
        [
            f"--training.global_batch_size={size}",
            "--training.local_batch_size=1",
            f"--modules.vision.config.num_hidden_layers={layers[0]}",
            f"--modules.vision.config.intermediate_size={wide[0]}",
            f"--modules.llm.config.num_hidden_layers={layers[1]}",
            f"--modules.llm.config.intermediate_size={wide[1]}",
            f"--debug.seed={seed}",
        ],
    )
    fixed = {"llm.activation_checkpoint": "none", "vision.activation_checkpoint": "none"}
    if rng.random() < 0.3:
        fixed["llm.activation_checkpoint"] = "full"
    problem = recipe_problem(resolve(given), machine="h100", ranks=int(rng.choice([2, 2, 3, 4])), fixed=fixed)
    machine = problem.machine
    slower = float(rng.choice([1, 10, 1000]))  # digits are so small that operations' overheads hide all else
    machine = replace(
        machine,
        peak_flops={kind: peak / slower for kind, peak in machine.peak_flops.items()},
        memory_bandwidth=machine.memory_bandwidth / slower,
        node_bandwidth=machine.node_bandwidth / float(rng.choice([1, 30, 1000])),
        operation_overhead=machine.operation_overhead / float(rng.choice([1, 10])),
        launch_overhead=0.0,
        context_bytes=0,  # beside which these models are nothing
        communicator_bytes=0,
    )
    problem = replace(problem, machine=machine)
    if rng.random() < 0.4:  # so that what would be fastest may not fit
        fastest = search(problem).fastest
        problem = replace(problem, memory_bytes=int(fastest.peak_bytes * rng.uniform(0.7, 1.0)))
    return problem


def simulated(problem, plans):
    """The shortest step of plans that fit, and how many there are; each simulated as the search does in the end."""
    predictor, best, count = Predictor(problem, BATCHES, LANES), float("inf"), 0
    for plan in plans:
        try:
            found = predictor.predict(plan)
        except HetmeshError:
            continue
        count += 1
        best = min(best, found.step_s) if found.fits else best
    return best, count


def every(problem):
    plans = itertools.chain.from_iterable(candidates(problem, placement) for placement in PLACEMENTS)
    return (way for each in plans for way in variants(problem, each))


@pytest.mark.parametrize("seed", some((1,), range(50)))
def test_the_optimum_is_that_of_brute_force(seed):
    problem = random_problem(seed)
    plans = list(every(problem))
    assert any(plan.modules["vision"].degree("pp") > 1 for plan in plans)
    best, count = simulated(problem, plans)
    found = search(problem)
    assert count
    if found.fastest is None:
        assert best == float("inf")
    else:
        filled = found.fastest.plan.schedule == "bubble_fill"  # which is no candidate, but a change of the best one
        assert found.fastest.step_s <= best * (1 + 1e-9), found.fastest.plan
        assert filled or found.fastest.step_s == pytest.approx(best, rel=1e-9), found.fastest.plan


@pytest.mark.exhaustive  # other searches are compared with all candidates above
@pytest.mark.parametrize("seed", [36, 45, *OTHERS])
def test_estimates_lead_near_the_optimum_where_few_candidates_are_simulated(monkeypatch, seed):
    """The problems above are so small that a search simulates whatever there is; here it has to choose, as in large
    ones. Of seeds 4 to 49 six fail: where memory is nearly full, estimates of bytes leave out the best of 7, 23, 27 and
    31, which miss it by 20 to 134%; 13 and 15 miss it by 10% and 8%. 39 misses it by 4%. With the worst estimates taken
    for the best 36, 45 and 49 fail, too."""
    problem = random_problem(seed)
    best, _ = simulated(problem, every(problem))
    for name, value in {"_MAX_SIMULATED": 8, "_MAX_FITTING": 4}.items():
        monkeypatch.setattr(sys.modules[search.__module__], name, value)
    found = search(problem).fastest
    assert (found is None) == (best == float("inf"))
    assert found is None or found.step_s <= 1.05 * best, found.plan


@pytest.mark.exhaustive  # tests/planner/test_encoder_plans.py has a chosen split
@pytest.mark.parametrize(("ranks", "seed"), [(3, 0), *MORE_RANKS])
def test_the_chosen_split_is_near_the_best_of_its_neighbours(ranks, seed):
    given = load_recipe(
        RECIPES / "digits.toml",
        ["--training.global_batch_size=24", "--training.local_batch_size=1", f"--debug.seed={seed}"],
    )
    fixed = {"llm.activation_checkpoint": "none", "vision.activation_checkpoint": "none", "placement": "disjoint"}
    problem = recipe_problem(resolve(given), machine="h100", ranks=ranks, fixed=fixed)
    problem = replace(problem, machine=replace(problem.machine, operation_overhead=1e-7, launch_overhead=0.0))
    chosen = search(problem).fastest
    own = chosen.plan.modules["vision"].ranks[1]
    for count in {own - 1, own + 1} & set(range(1, ranks)):
        layouts = [
            list(module_plans(problem, "vision", 0, count)),
            list(module_plans(problem, "llm", count, ranks - count)),
        ]
        choices = (dict(zip(problem.own, each, strict=True)) for each in itertools.product(*layouts))
        best, _ = simulated(problem, with_schedules(problem, "disjoint", choices))
        assert chosen.step_s <= 1.02 * best, (chosen.plan, count)
