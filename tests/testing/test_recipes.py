"""Drawn recipes: all of them pass the checks, all features occur, and a failing one is made small."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
import torch

from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.testing.parity import Outcome, ParityError, compare, run
from support import faults, plain_digits
from support.recipes import FEATURES, RecipeCase, draw_recipes, to_toml
from support.whole_runs import Ran, check_runs, compare_runs, has_run

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def fuzz(monkeypatch):
    """The module behind `tools/fuzz.py recipes`."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from fuzzing import fuzz_recipes

    return fuzz_recipes


@pytest.mark.slow
def test_drawn_recipes_pass_the_checks_and_hold_every_feature():
    cases = draw_recipes(200, 0, 8)
    assert set(FEATURES) - {name for case in cases for name in case.features} == set()
    for case in cases[::64]:
        checked(case.recipe)
        if case.then:
            checked(case.resumed)
            same = [(r.modules, r.data, r.batch.global_batch_size) for r in (case.recipe, case.resumed)]
            assert same[0] == same[1]


def test_the_same_seed_draws_the_same_recipes():
    first, again, other = (draw_recipes(5, seed) for seed in (3, 3, 4))
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.slow
def test_only_recipes_with_a_feature_are_drawn(fuzz):
    cases = list(fuzz.cases(5, 0, "expert parallel"))
    assert len(cases) == 5
    assert all("expert parallel" in case.features for case in cases)
    for case in cases:
        checked(case.recipe)
    assert {module.model for case in cases for module in case.recipe.modules.values()} >= {
        "qwen3_moe",
        "qwen3_vl_moe_text",
    }


def test_tables_survive_as_toml():
    tables = tomli.loads(draw_recipes(1, 0)[0].text)
    assert tomli.loads(to_toml(tables)) == tables


def work(case: RecipeCase) -> int:
    """About how long a recipe takes: its ranks, stages, microbatches and samples."""
    recipe = case.recipe
    stages = sum(mesh.axis_size("pp") for mesh in recipe.wiring.meshes.values())
    microbatches = recipe.batch.num_microbatches * recipe.batch.global_batch_size
    return len(recipe.wiring.ranks) * (10 + stages * microbatches) * (4 if has_run(recipe) else 1)


def learns(outcome: Outcome) -> bool:
    """Whether anything has a gradient: not where the one sample of a batch has nothing for what is trained."""
    return any(gradient is not None and bool(gradient.any()) for gradient in outcome.gradients.values())


def varied(cases: list[RecipeCase], count: int) -> Iterator[RecipeCase]:
    """`count` of them that hold many features for little work."""
    left, missing = sorted(cases, key=work), set(FEATURES)
    for _ in range(count):
        best = max(left, key=lambda case: len(missing & set(case.features)) / work(case))
        left.remove(best)
        missing -= set(best.features)
        yield best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "count", "seed"), [(4, 2, 100), pytest.param(8, 3, 101, marks=pytest.mark.exhaustive)]
)
def test_drawn_recipes_equal_one_process(pool, fuzz, world, count, seed):
    """Also a plain loop over transformers modules where the recipe trains the digits model."""
    pools = fuzz.Pools(pool(4), pool(8))
    for case in varied(draw_recipes(5 * count, seed, world), count):
        error = fuzz.problem(pools, case, steps=2)
        assert error is None, f"{error}\n\n{case.told()}"


@pytest.mark.exhaustive  # all features are above
@pytest.mark.slow
def test_few_recipes_hold_most_features():
    found = [case.features for case in varied(draw_recipes(120, 100, 4), 22)]
    assert len(set().union(*found)) >= len(FEATURES) - 8


def digits() -> RecipeCase:
    """Of the drawn recipes of the digits model that train all of it on several lanes, the one with least work."""
    found = []
    for case in draw_recipes(60, 0, graphs=("digits",)):
        recipe = case.recipe
        trained = all(module.trainable and module.lora is None for module in recipe.modules.values())
        if trained and recipe.training.dtype == "float64" and recipe.world_size == 4 and recipe.lanes > 1:
            found.append(case)
    return min(found, key=work)


def with_fault(rank, recipe, fault):
    return run(recipe, World.current(), 2, fault=fault)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plain_loop_finds_injected_faults(pool, fuzz):
    recipe = digits().recipe
    truth = fuzz.plain_outcome(recipe, 2)
    assert compare(truth, pool(4).run(with_fault, recipe, None), 1e-10) < 1e-10
    for fault in (faults.ScaleGradient("vision", 1.001), faults.PermuteRows("llm"), faults.DropReplica("llm", 1)):
        with pytest.raises(ParityError):
            compare(truth, pool(4).run(with_fault, recipe, fault), 1e-10)


@pytest.mark.exhaustive  # test_parity_compare.py has the comparison
@pytest.mark.slow
def test_a_wrong_gradient_anywhere_fails_a_drawn_recipe_and_is_made_small(pool, fuzz, monkeypatch):
    """The oracle of the tool, as a whole: a wrong truth is noticed, and the smallest recipe that shows it printed."""
    right = fuzz.reference

    def wrong(recipe, steps, lr, **how):
        outcome = right(recipe, steps, lr, **how)
        max((g for g in outcome.gradients.values() if g is not None), key=torch.linalg.vector_norm).mul_(1 + 1e-9)
        return outcome

    monkeypatch.setattr(fuzz, "reference", wrong)
    pools = fuzz.Pools(pool(4), pool(8))
    exact = [case for case in draw_recipes(20, 5) if case.recipe.training.dtype == "float64"]
    judged = sorted((case for case in exact if fuzz.oracle(case.recipe) != fuzz.REPEATED), key=work)
    case = next(case for case in judged if learns(right(case.recipe, 1, fuzz.LR)))
    error = fuzz.problem(pools, case, steps=1)
    assert isinstance(error, ParityError)
    small = fuzz.simplest(case, lambda other: fuzz.problem(pools, other, steps=1) is not None, tries=3)
    assert len(small.text) < len(case.text)


def test_a_failing_run_is_made_small_in_both_of_its_recipes(fuzz):
    case = RecipeCase("[training]\nsteps = 4\nlocal_batch_size = 4\n", '[balance]\npolicy = "none"\n')
    found = list(fuzz.candidates_of(case))
    assert found[0] == RecipeCase(case.text)
    assert {each.text for each in found} == {
        case.text,
        "[training]\nsteps = 4\n",
        case.text.replace("size = 4", "size = 2"),
    }
    assert {each.then for each in found[1:]} == {case.then, "[balance]\n"}


def outcome(loss=1.0, gradient=1.0):
    weight = {"llm.weight": torch.full((2,), gradient), "llm.frozen": None}
    return Outcome((1.0, loss), weight, {"llm.weight": torch.ones(2)})


def test_two_runs_must_be_equal_bit_for_bit(fuzz):
    fuzz.check_equal([outcome(), outcome(2.0)], [outcome(), outcome(2.0)])
    with pytest.raises(ParityError, match=r"a second run gave rank 1 the losses"):
        fuzz.check_equal([outcome(), outcome()], [outcome(), outcome(1.0 + 1e-15)])
    with pytest.raises(ParityError, match=r"a second run gave rank 0 another gradient llm\.weight"):
        fuzz.check_equal([outcome()], [outcome(gradient=1.0 + 1e-6)])
    with pytest.raises(ParityError, match=r"losses on rank 0 are not finite"):
        fuzz.check_equal([outcome(float("nan"))], [outcome(float("nan"))])


def ran(loss=1.0, norm=2.0, parameter=1.0, guess=3, answer=4, steps=2):
    evaluation = (loss, torch.tensor([True]), torch.tensor([[guess]]))
    return Ran(
        1, (loss,) * steps, (norm,) * steps, {"llm.weight": torch.full((2,), parameter)}, evaluation, ((answer,),)
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loss": 1.0 + 1e-15}, "the loss of step 2 on rank 1"),
        ({"norm": 2.1}, "the gradient norm of step 2 on rank 1"),
        ({"steps": 1}, "1 steps on rank 1, not 2"),
        ({"parameter": 1.0 + 1e-6}, "parameter llm.weight on rank 1 is off"),
        ({"guess": 5}, r"other guesses: \[\[5\]\], not \[\[3\]\]"),
        ({"answer": 5}, "rank 1 answers"),
    ],
)
def test_runs_that_differ_are_found(wrong, says):
    compare_runs([ran(), ran()], [ran(), ran()], "going on")
    with pytest.raises(ParityError, match=says):
        compare_runs([ran(), ran()], [ran(), ran(**wrong)], "going on")
    compare_runs([ran()], [ran(1.0 + 1e-11, 2.0 + 1e-11, 1.0 + 1e-11)], "going on", 1e-10)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_goes_on_as_another_one_is_found(pool):
    cases = draw_recipes(40, 0, 2, feature="checkpoint")
    case = min((case for case in cases if case.then and case.recipe.training.dtype == "float64"), key=work)
    check_runs(pool, case)
    text = case.text.replace("lr = 0.01", "lr = 0.02")
    with pytest.raises(ParityError, match="going on from a checkpoint: the loss of step"):
        check_runs(pool, Altered(case.text, case.then, text))


class Altered(RecipeCase):
    """A case that goes on with another recipe."""

    def __init__(self, text, then, other):
        super().__init__(text, then)
        object.__setattr__(self, "other", RecipeCase(other, then))

    @property
    def resumed(self):
        return self.other.resumed


def test_the_plain_loop_knows_nothing_of_hetmesh():
    assert "import hetmesh" not in (source := Path(plain_digits.__file__).read_text())
    assert "from hetmesh" not in source
    assert "hetmesh" not in {name.split(".")[0] for name in vars(sys.modules[plain_digits.__name__])}
