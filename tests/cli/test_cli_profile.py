"""`hetmesh profile`: what it writes and says."""

from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.cost import Profile
from hetmesh.recipe.recipe import load_recipe
from hetmesh.training.collective_profile import group_recipe, measure_collectives

DIGITS = str(Path(__file__).parents[2] / "recipes" / "digits.toml")


def command(*arguments):
    return main([*arguments])


@pytest.mark.exhaustive  # parts: test_collectives_of_context_parallelism_are_measured, tests/training/test_profile.py
@pytest.mark.slow
def test_a_profile_is_written_and_its_errors_said(tmp_path, start_forked):
    """E1: layers, and their collectives with a process for each rank: in a process of its own, which starts them."""
    path = tmp_path / "new" / "profile.json"
    keys = ("--seconds", "0", "--training.local_batch_size", "4", "--output", str(path))
    process = start_forked(command, "profile", DIGITS.replace("digits.", "digits_colocated."), *keys)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "held-out shapes: mean error" in out
    assert "collectives of tensor and context parallelism: measured with 2 processes" in out
    assert "held-out shapes of collectives: mean error" in out
    assert "start anew" not in err  # workers are forked
    profile = Profile.load(path)
    assert {kind.rpartition("tp ")[2] for kind in profile.layers} == {"1", "2"}
    judge_collectives(profile.collectives, "tp 2")


@pytest.mark.slow
def test_a_profile_may_take_the_place_of_one_of_other_modules(capsys, tmp_path):
    path = tmp_path / "profile.json"
    Profile().save(path)
    arguments = ["--output", str(path), "--seconds", "0", "--training.local_batch_size", "4"]
    arguments += ["--profiling.profile", str(path)]
    assert main(["profile", DIGITS.replace("digits.", "digits_single."), *arguments]) == 0
    assert f"{len(Profile.load(path).layers)} kinds of layers in float32 on cpu" in capsys.readouterr().out
    assert Profile.load(path).layers


@pytest.mark.exhaustive  # those of tensor parallelism are above
@pytest.mark.slow
def test_collectives_of_context_parallelism_are_measured(pool, tmp_path):
    recipe = load_recipe(DIGITS.replace("digits.", "digits_long."), ("--training.local_batch_size=4",))
    pool(2).run(measured, recipe, str(tmp_path / "profile.json"))
    judge_collectives(Profile.load(tmp_path / "profile.json").collectives, "cp 2")


def measured(rank, recipe, path):
    measure_collectives(group_recipe(recipe), path)


def judge_collectives(found, degree):
    """That the LLM's blocks have collectives, and its norm has fewer."""
    blocks = [parts for kind, parts in found.items() if not kind.startswith("attention 0") and degree in kind]
    (block,) = ([part.at(100, 1000) for part in parts.values()] for parts in blocks)
    norm = next(parts for kind, parts in found.items() if kind.startswith("attention 0; weights 96; on rows"))
    assert min(block) > 0
    assert max(part.at(100, 1000) for part in norm.values()) < max(block)


def test_a_wrong_recipe_is_an_error(capsys):
    assert main(["profile", "nowhere.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
