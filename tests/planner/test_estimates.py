"""What estimates remember changes no answer."""

import itertools
from pathlib import Path

import pytest

from hetmesh.cost import module_memory
from hetmesh.cost.stage_cuts import default_splits
from hetmesh.cost.static_memory import most_held
from hetmesh.errors import HetmeshError
from hetmesh.planner import PLACEMENTS, candidates, laid_out
from hetmesh.planner.estimate import Estimator
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.planning import recipe_problem
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import LayerCosts
from hetmesh.simulate.stage_contents import stage_contents

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.toml"


@pytest.mark.slow
def test_estimates_are_the_same_whatever_was_estimated_before():
    sizes = ["--training.global_batch_size=48", "--training.local_batch_size=1"]
    given = recipe_problem(resolve(load_recipe(RECIPE, sizes)), machine="h100", ranks=16)
    some = [plan for name in PLACEMENTS for plan in itertools.islice(candidates(given, name), 0, 6000, 41)]
    assert len(some) > 40
    together, layers = Estimator(given, LayerCosts(given.machine)), LayerCosts(given.machine)
    first = {plan.key(): _estimate(together, plan) for plan in some}
    for plan in reversed(some[::7]):
        default_splits.cache_clear()
        stage_contents.cache_clear()
        assert _estimate(Estimator(given, layers), plan) == first[plan.key()]
        graph = laid_out(given, plan)
        for name in plan.modules:
            shape = given.facts[name].shape
            held = module_memory(shape, graph[name], given.optimizer)
            assert most_held(shape, graph[name], given.optimizer) == max(each.total for each in held.values())


def _estimate(estimator, plan):
    try:
        return estimator.estimate(plan)
    except HetmeshError as error:
        return str(error)
