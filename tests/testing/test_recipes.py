"""Drawn recipes: all of them pass the checks, all features occur, and a failing one is made small."""

import sys
from pathlib import Path

import pytest
import tomli

from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.testing import faults, plain_digits
from hetmesh.testing.parity import ParityError, compare, run
from hetmesh.testing.recipes import FEATURES, RecipeCase, draw_recipes, to_toml

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def fuzz(monkeypatch):
    """The module behind `tools/fuzz.py recipes`."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from fuzzing import fuzz_recipes

    return fuzz_recipes


def test_drawn_recipes_pass_the_checks_and_hold_every_feature():
    found = set()
    for case in draw_recipes(120, 0, 8):
        checked(case.recipe)
        found |= set(case.features)
    assert set(FEATURES) - found == set()


def test_the_same_seed_draws_the_same_recipes():
    first, again, other = (draw_recipes(5, seed) for seed in (3, 3, 4))
    assert first == again
    assert not set(first) & set(other)


def test_tables_survive_as_toml():
    tables = tomli.loads(draw_recipes(1, 0)[0].text)
    assert tomli.loads(to_toml(tables)) == tables


@pytest.mark.slow
@pytest.mark.parametrize(("world", "count", "seed"), [(4, 16, 100), (8, 4, 101)])
def test_drawn_recipes_equal_one_process(pool, fuzz, world, count, seed):
    """Also a plain loop over transformers modules where the recipe trains the digits model."""
    pools = fuzz.Pools(pool(4), pool(8))
    for case in draw_recipes(count, seed, world):
        error = fuzz.problem(pools, case)
        assert error is None, f"{error}\n\n{case.text}"


def digits() -> RecipeCase:
    """Of the drawn recipes of the digits model that train all of it on several lanes, the one with fewest samples."""
    found = []
    for case in draw_recipes(60, 0, graphs=("digits",)):
        recipe = case.recipe
        trained = all(module.trainable and module.lora is None for module in recipe.modules.values())
        if trained and recipe.training.dtype == "float64" and recipe.world_size == 4 and recipe.lanes > 1:
            found.append(case)
    return min(found, key=lambda case: case.recipe.batch.global_batch_size)


def with_fault(rank, recipe, fault):
    return run(recipe, World.current(), 3, fault=fault)


@pytest.mark.slow
def test_the_plain_loop_finds_injected_faults(pool, fuzz):
    recipe = digits().recipe
    truth = fuzz.plain_outcome(recipe)
    assert compare(truth, pool(4).run(with_fault, recipe, None), 1e-10) < 1e-10
    for fault in (faults.ScaleGradient("vision", 1.001), faults.PermuteRows("llm"), faults.DropReplica("llm", 1)):
        with pytest.raises(ParityError):
            compare(truth, pool(4).run(with_fault, recipe, fault), 1e-10)


@pytest.mark.slow
def test_a_wrong_gradient_anywhere_fails_a_drawn_recipe_and_is_made_small(pool, fuzz, monkeypatch):
    """The oracle of the tool, as a whole: a wrong truth is noticed, and the smallest recipe that shows it printed."""
    right = fuzz.reference

    def wrong(recipe, steps, lr, **how):
        outcome = right(recipe, steps, lr, **how)
        name = next(name for name, gradient in outcome.gradients.items() if gradient is not None)
        outcome.gradients[name] *= 1 + 1e-9
        return outcome

    monkeypatch.setattr(fuzz, "reference", wrong)
    pools, case = fuzz.Pools(pool(4), pool(8)), draw_recipes(1, 5)[0]
    error = fuzz.problem(pools, case)
    assert isinstance(error, ParityError)
    small = fuzz.simplest(case, lambda other: fuzz.problem(pools, other) is not None, tries=5)
    assert len(small.text) < len(case.text)


def test_the_plain_loop_knows_nothing_of_hetmesh():
    assert "import hetmesh" not in (source := Path(plain_digits.__file__).read_text())
    assert "from hetmesh" not in source
    assert "hetmesh" not in {name.split(".")[0] for name in vars(sys.modules[plain_digits.__name__])}
