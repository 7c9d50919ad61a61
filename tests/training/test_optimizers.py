"""One optimizer over the modules of a rank, in groups that each fit one kernel; one learning rate for all ranks."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hetmesh.errors import RecipeError
from hetmesh.layout import MeshSpec
from hetmesh.parallel.apply import Root
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.records.checkpoint_folders import complete_steps
from hetmesh.resolve.refusals import check_recipe
from hetmesh.training.optimizers import learning_rate, make_optimizers

TEXT = """
[modules]
vision = { model = "siglip", lr = 0.25 }
llm = { model = "qwen3", weight_decay = 0.5 }
[[boundaries]]
from = "vision"
to = "llm"
at = "image"
[optimizer]
lr = 0.125
weight_decay = 0.0625
[training]
steps = 6
[lr_scheduler]
warmup_steps = 2
min_lr_factor = 0.5
"""


def mixed(world):
    """`vision` with a frozen parameter, `llm` with parameters on two meshes and a plain one."""
    meshes = [world.device_mesh(MeshSpec.make([0], **{axis: 1})) for axis in ("tp", "dp_shard")]
    vision, llm = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Module()
    vision[0].weight.requires_grad_(False)
    for name, mesh in zip(("a", "b", "c"), (*meshes, meshes[0]), strict=True):
        llm.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])))
    llm.plain = nn.Parameter(torch.ones(2))
    return Root([("vision", vision), ("llm", llm)])


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_sharded_and_plain_parameters_take_a_step_together(world, name, implementation):
    overrides = ("--optimizer.name", name, "--optimizer.implementation", implementation)
    root = mixed(world)
    before = {k: p.detach().clone() for k, p in root.named_parameters()}
    optimizers, _ = make_optimizers(parse_recipe(TEXT, overrides), root)
    for parameter in root.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    changed = {k for k, p in root.named_parameters() if not torch.equal(whole(p), whole(before[k]))}
    assert changed == set(before) - {"vision.0.weight"}
    assert torch.equal(whole(root.llm.a), whole(root.llm.b))
    assert torch.equal(whole(root.llm.a)[0], root.llm.plain)


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_groups_have_their_modules_rates_and_one_mesh_each(world):
    root = mixed(world)
    ((optimizer,), _) = (list(made) for made in make_optimizers(parse_recipe(TEXT), root))
    names = {id(p): k for k, p in root.named_parameters()}
    groups = {tuple(names[id(p)] for p in g["params"]): g for g in optimizer.param_groups}
    assert {k: (g["initial_lr"], g["weight_decay"]) for k, g in groups.items()} == {
        ("vision.0.bias", "vision.1.weight", "vision.1.bias"): (0.25, 0.0625),
        ("llm.a", "llm.c"): (0.125, 0.5),
        ("llm.b",): (0.125, 0.5),
        ("llm.plain",): (0.125, 0.5),
    }


def test_all_ranks_know_the_learning_rate():
    """Also those without anything to train, where metrics.jsonl may be written."""
    recipe = parse_recipe(TEXT)
    assert make_optimizers(recipe, Root([("vision", nn.Linear(2, 2).requires_grad_(False))])) is None
    rate = learning_rate(recipe)
    root = Root([("vision", nn.Linear(2, 2))])
    optimizers, schedulers = make_optimizers(recipe, root)
    rates = []
    for step in range(6):
        rates.append(rate(step))
        (group,) = optimizers.optimizers[0].param_groups
        assert group["lr"] == 2 * rates[-1]  # its own rate is twice the recipe's
        optimizers.step()
        schedulers.step()
    assert rates[:3] == [0.0625, 0.125, 0.125]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0.0625 <= rates[-1] < 0.1


def test_a_run_may_end_before_its_schedule():
    """torchtitan's lr_scheduler.total_steps."""
    whole_run, cut = (
        learning_rate(parse_recipe(TEXT, more))
        for more in ((), ("--training.steps", "4", "--lr_scheduler.total_steps", "6"))
    )
    assert [whole_run(i) for i in range(4)] == [cut(i) for i in range(4)]
    assert cut(3) != learning_rate(parse_recipe(TEXT, ("--training.steps", "4")))(3)
    with pytest.raises(RecipeError, match=r"lr_scheduler\.total_steps = 5: .* valid are 6 and more"):
        check_recipe(parse_recipe(TEXT, ("--lr_scheduler.total_steps", "5")))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_an_update_that_fails_on_one_rank_ends_all_of_them_and_is_not_saved(start_training, tmp_path):
    """Megatron-LM's test_mimo_optimizer_consensus.py: whether all ranks were updated is no rank's own opinion."""
    command = start_training(
        Path(__file__).parents[2] / "recipes" / "digits_overlapping.toml",
        *(
            "--data.source",
            "support.faulty_sources:FailingUpdate",
            "--training.steps",
            "3",
            "--training.local_batch_size",
            "8",
        ),
        *("--checkpoint.enable", "true", "--checkpoint.interval", "1", "--validation.samples", "4"),
        *("--job.dump_folder", str(tmp_path / "run"), "--metrics.enable_tensorboard", "false"),
    )
    _, err = command.communicate(timeout=120)
    assert command.returncode == 1
    assert "rank 1" in err
    assert "RuntimeError: no memory for the update" in err
    assert complete_steps(tmp_path / "run" / "checkpoint") == [1]
