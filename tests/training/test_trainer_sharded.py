"""The trainer over sharded modules: one optimizer over DTensors of several meshes, one norm, resume, evaluation."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.trainer import Trainer

pytestmark = pytest.mark.slow

RECIPE = (Path(__file__).parents[2] / "recipes" / "digits_overlapping.toml").read_text()

# eps far above its default keeps AdamW smooth where gradients are rounding errors, so that layouts compare exactly.
OVERRIDES = (
    *("--training.dtype", "float64", "--optimizer.eps", "0.01", "--training.local_batch_size", "6"),
    *("--training.steps", "4", "--validation.samples", "12", "--modules.llm.config.num_hidden_layers", "1"),
    *("--modules.vision.config.num_hidden_layers", "1", "--metrics.enable_tensorboard", "false"),
    *("--training.global_batch_size", "12", "--training.max_norm", "0.05", "--checkpoint.interval", "2"),
)
SHARDED = (
    *("--parallelism.vision.ranks", "0-2", "--parallelism.vision.data_parallel_replicate_degree", "1"),
    *("--parallelism.vision.data_parallel_shard_degree", "3", "--parallelism.llm.ranks", "0-3"),
    *("--parallelism.llm.data_parallel_replicate_degree", "1", "--parallelism.llm.data_parallel_shard_degree", "2"),
    *("--parallelism.llm.tensor_parallel_degree", "2"),
)
SINGLE = (
    *("--parallelism.vision.ranks", "0", "--parallelism.vision.data_parallel_replicate_degree", "1"),
    *("--parallelism.llm.ranks", "0", "--parallelism.llm.data_parallel_replicate_degree", "1"),
    *("--training.local_batch_size", "12"),
)


def train(rank, recipe, steps):
    """Losses, gradient norms, full parameters after the last step, the evaluation's loss."""
    world = World.current()
    if rank >= recipe.world_size:
        return None
    trainer = Trainer(resolve(recipe), world)
    placed, resumed, taken = trainer.job.expert_placement, trainer.step, []
    assert not resumed or all(
        each[0] != tuple(range(len(each[0]))) for each in map(placed.placements.get, placed.every)
    )
    with exact_dtypes(trainer.job.root):
        while trainer.step < steps:
            taken.append(trainer.train_step())
            if recipe.checkpoint.enable and trainer.step % recipe.checkpoint.interval == 0:
                trainer.validate()  # before the save: what evaluation gathered must not be what is saved
                trainer.save()
        evaluation = trainer.validate()
    trainer.reporter.close()
    assert resumed or all(sum(m.expert_placement[name]["moved"] for m in taken) for name in placed.every)
    placed.to_expert_order(trainer.optimizers)  # where tensors are in the order of experts
    full = {k: p.full_tensor() if isinstance(p, DTensor) else p for k, p in trainer.job.root.state_dict().items()}
    return [m.loss for m in taken], [m.grad_norm for m in taken], full, evaluation.loss


def test_adamw_clipping_evaluation_and_resume_over_sharded_modules(pool4, pool, tmp_path):
    folder = ("--job.dump_folder", str(tmp_path), "--checkpoint.enable", "true")
    single = parse_recipe(RECIPE, (*OVERRIDES, *SINGLE, "--job.dump_folder", str(tmp_path / "single")))
    (expected,) = pool(1).run(train, single, 4, timeout=120)
    sharded = parse_recipe(RECIPE, (*OVERRIDES, *SHARDED, *folder))
    check_training_and_resuming(pool4, sharded, expected, tmp_path)


def check_training_and_resuming(pool4, recipe, alone, folder):
    """Four steps of `recipe`, which keeps checkpoints of every other one in `folder`, give what `alone` did, and a run
    that goes on from the second the same bits."""
    losses, norms, expected, evaluated = alone
    whole = pool4.run(train, recipe, 4, timeout=120)
    for other_losses, other_norms, parameters, other in whole:
        assert other_losses == pytest.approx(losses, rel=1e-10)
        assert other_norms == pytest.approx(norms, rel=1e-10)
        assert other == pytest.approx(evaluated, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10)
    for path in folder.glob("checkpoint/step-4"):
        path.rename(folder / "away")
    for (*_, before, _), (resumed, _, after, _) in zip(whole, pool4.run(train, recipe, 4, timeout=120), strict=True):
        assert len(resumed) == 2
        assert all(torch.equal(before[name], after[name]) for name in before)


def loaded(rank, recipe):
    """Full parameters and optimizer moments as they were read."""
    if rank >= recipe.world_size:
        return None
    trainer = Trainer(resolve(recipe), World.current())
    trainer.reporter.close()
    assert trainer.step == 2
    trainer.job.expert_placement.to_expert_order(trainer.optimizers)
    state = {**trainer.job.root.state_dict(), **trainer.optimizers[0].state_dict()}
    return {
        k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items() if isinstance(v, torch.Tensor)
    }


@pytest.mark.exhaustive  # checkpoint/test_checkpoint_pairs.py
def test_a_checkpoint_of_sharded_modules_loads_into_any_layout(pool4, pool, tmp_path):
    """Uneven shards of shards (the vocabulary over tp 2 and dp_shard 2) land where they belong."""
    folder = ("--job.dump_folder", str(tmp_path), "--checkpoint.enable", "true")
    *_, saved, _ = pool4.run(train, parse_recipe(RECIPE, (*OVERRIDES, *SHARDED, *folder)), 2, timeout=120)[0]
    (state,) = pool(1).run(loaded, parse_recipe(RECIPE, (*OVERRIDES, *SINGLE, *folder)), timeout=120)
    assert all(torch.equal(value, state[name]) for name, value in saved.items())
