"""A loss or gradient that is not finite never reaches the optimizer, on any rank, wherever it was seen."""

import json
import math
from pathlib import Path

import pytest
import torch

from hetmesh.boundary import World
from hetmesh.errors import NonFiniteError
from hetmesh.parallel import local_part
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer
from support.faults import BreakGradient

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name, folder, *overrides):
    small = (
        *("--training.local_batch_size", "4", "--training.steps", "3", "--validation.samples", "2"),
        *("--modules.llm.config.num_hidden_layers", "1", "--modules.vision.config.num_hidden_layers", "1"),
        *("--metrics.enable_tensorboard", "false", "--metrics.log_freq", "10"),
    )
    return load_recipe(RECIPES / f"{name}.toml", (*small, "--job.dump_folder", str(folder), *overrides))


def values(trainer):
    return [local_part(p.detach()).clone() for p in trainer.job.parameters()]


def same(before, trainer):
    return all(torch.equal(a, b) for a, b in zip(before, values(trainer), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_stops_the_run_before_anything_changes(world, tmp_path, value):
    trainer = Trainer(resolve(recipe("digits_single", tmp_path)), world)
    BreakGradient("vision", 0, value)(trainer.job)
    before = values(trainer)
    with pytest.raises(NonFiniteError, match=r"^step 1: gradients of vision \(rank 0\) are not finite .*on_non_finite"):
        trainer.run()
    assert same(before, trainer)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_loss_that_is_not_finite_is_named_with_the_parameters_that_made_it(world, tmp_path):
    trainer = Trainer(resolve(recipe("digits_single", tmp_path)), world)
    with torch.no_grad():
        next(trainer.job.root.projector.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"the loss \(rank 0\) and parameters of projector \(rank 0\)"):
        trainer.run()


def test_a_skipped_step_is_counted_and_everything_written_is_strict_json(world, tmp_path, capsys):
    trainer = Trainer(resolve(recipe("digits_single", tmp_path, "--training.on_non_finite", "skip")), world)
    BreakGradient("llm", 0)(trainer.job)
    before = values(trainer)
    summary = trainer.run()
    assert not same(before, trainer)  # the other steps did train

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(x, parse_constant=refuse) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [line["grad_norm"] is None for line in lines] == [True, False, False]
    assert [line["skipped_steps"] for line in lines] == [1, 1, 1]
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse) == summary
    assert summary["skipped_steps"] == 1
    out = capsys.readouterr().out
    assert "step 1: gradients of llm (rank 0) are not finite" in out
    assert "(skipped)" in out


def test_the_count_of_skipped_steps_survives_a_resume(world, tmp_path):
    keys = ("--training.on_non_finite", "skip", "--checkpoint.enable", "true")
    first = Trainer(resolve(recipe("digits_single", tmp_path, *keys)), world)
    BreakGradient("llm", 0)(first.job)
    assert first.train_step().skipped
    first.save()
    first.reporter.close()
    second = Trainer(resolve(recipe("digits_single", tmp_path, *keys)), world)
    assert second.run()["skipped_steps"] == 1


def test_too_many_in_a_row_end_the_run(world, tmp_path):
    keys = ("--training.on_non_finite", "skip", "--training.max_consecutive_non_finite", "1")
    keys += ("--checkpoint.enable", "true", "--training.steps", "4")
    trainer = Trainer(resolve(recipe("digits_single", tmp_path, *keys)), world)
    BreakGradient("llm", 0)(trainer.job)
    assert trainer.train_step().record()["skipped_in_a_row"] == 1
    assert "skipped_in_a_row" not in trainer.train_step().record()
    BreakGradient("llm", 0)(trainer.job)
    trainer.train_step()
    trainer.save()
    trainer.reporter.close()
    resumed = Trainer(resolve(recipe("digits_single", tmp_path, *keys)), world)
    BreakGradient("llm", 0)(resumed.job)
    with pytest.raises(
        NonFiniteError, match=r"^step 4: .*; 2 steps in a row were not, .*max_consecutive_non_finite = 1"
    ):
        resumed.run()


def steps_with_a_broken_gradient(rank, described, module, at):
    """What each rank saw of one broken step, and whether its parameters moved; then the next step."""
    trainer = Trainer(resolve(described), World.current())
    BreakGradient(module, at)(trainer.job)
    before = values(trainer)
    try:
        metrics, error = trainer.train_step(), ""
        after = trainer.train_step()
    except NonFiniteError as raised:
        return str(raised), same(before, trainer)
    finally:
        trainer.reporter.close()
    return metrics.skipped, after.skipped, math.isfinite(after.loss), error


@pytest.mark.parametrize(("module", "at"), [("vision", 1), ("llm", 3)])
def test_a_value_on_one_rank_of_one_module_is_seen_by_all(pool4, tmp_path, module, at):
    """U25. Rank 1 holds a replica of the encoder, which does not count in the norm, rank 3 a shard of the LLM."""
    stop = pool4.run(steps_with_a_broken_gradient, recipe("digits", tmp_path), module, at)
    for error, unchanged in stop:
        assert error.startswith(f"step 1: gradients of {module} (rank {at}) are not finite")
        assert unchanged
    skip = recipe("digits", tmp_path, "--training.on_non_finite", "skip")
    assert pool4.run(steps_with_a_broken_gradient, skip, module, at) == [(True, False, True, "")] * 4
