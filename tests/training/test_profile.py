"""Measuring the layers of a recipe."""

from pathlib import Path

import pytest

from hetmesh.boundary import World
from hetmesh.cost import Profile, Work, layer_kind
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import compare, reference, run_as
from hetmesh.training.job import Job
from hetmesh.training.profile import profile_recipe, sample_shapes
from support import parity_cases
from support.profiles import write_profile

DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"


def test_shapes_hold_out_every_other_size():
    recipe = load_recipe(DIGITS)
    resolved = resolve(recipe)
    loader = Loader(resolved.source, 64, resolved.expander)
    shapes = sample_shapes(loader, 64)
    sizes = {flag: {len(s.drawn) for s in shapes if s.held_out is flag} for flag in (False, True)}
    assert sizes == {False: {1, 4, 16, 64}, True: {2, 8, 32}}
    short, long, _ = (sum(d.meta.tokens for d in s.drawn) for s in shapes[-3:])
    assert short < long


@pytest.mark.slow
def test_every_layer_of_every_module_is_measured():
    recipe = load_recipe(DIGITS, ("--training.local_batch_size", "8"))
    profile = profile_recipe(resolve(recipe), seconds=1)
    resolved = resolve(recipe)
    for shape in resolved.shapes.values():
        for layer in shape.layers:
            assert layer_kind(layer) in profile.layers
            time = profile.predict(layer, Work(200, 4000, 20), upstream=True)
            assert time.forward > 0
            if layer.attention_width:
                assert time.backward_input > 0
                assert time.backward_weight > 0
    assert profile.held_out.count > 20
    assert isinstance(profile, Profile)


@pytest.mark.slow
def test_layers_of_a_module_after_the_llm_are_measured_too():
    recipe = load_recipe(DIGITS.with_name("digits_draw.toml"), ("--training.local_batch_size", "4"))
    resolved = resolve(recipe)
    profile = profile_recipe(resolved, seconds=0)
    assert {layer_kind(layer) for layer in resolved.shapes["drawer"].layers} <= profile.layers.keys()


def with_own_profile(rank, recipes):
    with pytest.raises(RecipeError) as refused:
        Job.assemble(resolve(recipes[rank]), World.current())
    return str(refused.value)


@pytest.mark.slow
def test_ranks_that_read_different_profiles_are_refused(pool, tmp_path):
    """E1: they would deal the samples of a batch out differently."""
    recipe = DIGITS.with_name("digits_colocated.toml")
    keys = [f"--parallelism.{key}" for key in ("vision.ranks=0-1", "llm.ranks=0-1")]
    keys += [f"--parallelism.{name}.data_parallel_replicate_degree=1" for name in ("vision", "llm")]
    keys += ["--parallelism.vision.tensor_parallel_degree=2"]
    recipes = []
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        write_profile(path, resolve(load_recipe(recipe, keys)), {"llm": 1.0 + rank})
        recipes.append(load_recipe(recipe, (*keys, f"--profiling.profile={path}")))
    for rank, said in enumerate(pool(2).run(with_own_profile, recipes)):
        assert said.startswith(f"profiling.profile = '{tmp_path / str(rank)}.json': the file of rank 1 is not")


@pytest.mark.slow
def test_a_run_by_measured_costs_equals_one_process(pool4, tmp_path):
    """E1: loads, cuts and scores by a profile change who computes what, and nothing else."""
    given, path = parity_cases.recipe("1f1b", *parity_cases.OVER_BOTH_STAGES, batch=8), tmp_path / "profile.json"
    write_profile(path, resolve(given), {"vision": 5.0}, dtype="float64")
    profiling = given.profiling.model_copy(update={"profile": str(path)})
    measured = given.model_copy(update={"profiling": profiling})
    before, after = (resolve(each) for each in (given, measured))
    metas = before.loader().batch(0).metas
    assert before.plan(metas).lanes != after.plan(metas).lanes
    compare(reference(measured, 2), pool4.run(run_as, measured, 2, timeout=120), 1e-10)
