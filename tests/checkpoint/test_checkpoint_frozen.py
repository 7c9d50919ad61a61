"""Frozen parameters are on the disk once, whatever becomes of the other checkpoints."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers import SiglipVisionConfig, SiglipVisionModel

from hetmesh.checkpoint import writing
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.reading import Index
from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.refusals import check_run
from hetmesh.resolve.resolved import resolve
from hetmesh.training.one_process import OneProcess
from hetmesh.training.optimizers import make_optimizers
from hetmesh.training.trainer import Trainer
from support.checkpoint_pieces import Gate, different, everything, make, steps

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4, "num_channels": 1, "vision_use_head": False},
}


def half_frozen():
    root, _ = make()
    root.llm.unused.requires_grad_(False)
    return root, make_optimizers(parse_recipe('[modules.llm]\nmodel = "qwen3"', ("--training.steps", "6")), root)


def no_links(source, target):
    raise PermissionError("this file system knows no links")


def files(folder):
    """Inode of each file of frozen parameters, by step."""
    return {int(path.parent.name[5:]): path.stat().st_ino for path in folder.glob("step-*/__0_frozen_0.distcp")}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_share_what_is_frozen(world, tmp_path, asynchronous):
    checkpointer = Checkpointer(world, tmp_path, keep_latest=2, asynchronous=asynchronous)
    root, optimizers = half_frozen()
    for step in (1, 2, 3):
        steps(root, optimizers, [True])
        checkpointer.save(step, root, optimizers, {})
        checkpointer.wait()
    checkpointer.close()
    found = files(tmp_path)
    assert sorted(found) == [2, 3]  # the one that it was written for is gone
    assert len(set(found.values())) == 1
    other, resumed = half_frozen()
    with torch.no_grad():
        other.llm.unused.weight.zero_()
    checkpointer.load(3, other, resumed, {})
    assert different(everything(root, optimizers), everything(other, resumed)) == []


def add_in_place(parameter):
    with torch.no_grad():
        parameter.add_(1)


def assign_data_twice(parameter):
    """Where its values lie may be where they lay."""
    parameter.data = parameter.data + 0.5
    parameter.data = parameter.data + 0.5


@pytest.mark.parametrize(
    ("change", "sharded"), [(add_in_place, False), (assign_data_twice, False), (add_in_place, True)]
)
def test_what_has_changed_all_the_same_is_written_again(world, tmp_path, change, sharded):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = half_frozen()
    if sharded:
        weight = distribute_tensor(root.llm.unused.weight, init_device_mesh("cpu", (1,)), [Shard(0)])
        root.llm.unused.weight = torch.nn.Parameter(weight, requires_grad=False)
    checkpointer.save(1, root, optimizers, {})
    change(root.llm.unused.weight)
    checkpointer.save(2, root, optimizers, {})
    root.llm.unused.bias.requires_grad_(True)  # no longer frozen: in the file of what changes
    checkpointer.save(3, root, optimizers, {})
    assert len(set(files(tmp_path).values())) == 3
    for step in (2, 3):
        other, resumed = half_frozen()
        checkpointer.load(step, other, resumed, {})
        assert torch.equal(other.llm.unused.weight, local_part(root.llm.unused.weight))


def test_damage_of_what_checkpoints_share_is_told_of_all(world, tmp_path):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = half_frozen()
    for step in (1, 2, 3):
        if step == 2:
            add_in_place(root.llm.unused.weight)
        checkpointer.save(step, root, optimizers, {})
    file = tmp_path / "step-3" / "__0_frozen_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)  # in place, as disks do it
    told = r"restore it from a copy, or remove the folder to resume from step-1; it is in step-2 too, by a link$"
    with pytest.raises(CheckpointError, match=told):
        checkpointer.load(3, root, optimizers, {})
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"; restore it from a copy; it is in step-2 too, by a link$"):
        checkpointer.load(3, root, optimizers, {})


def printed(*tensors):
    return writing.fingerprint_of(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 3, 64, 3 << 18])
def test_other_bytes_have_another_fingerprint(dtype, count):
    tensor = torch.arange(count).remainder(2).to(dtype)
    assert printed(tensor, tensor) == printed(tensor.clone(), tensor.clone())
    for place in {0, count // 2, count - 1} if count else ():
        other = tensor.clone()
        other[place] = 1 - other[place].int()
        assert printed(other) != printed(tensor)
        assert printed(tensor, other) != printed(other, tensor)
    if count > 1:
        assert printed(tensor.flip(0)) != printed(tensor) or torch.equal(tensor.flip(0), tensor)
        assert printed(tensor[1:]) == printed(tensor[1:].clone())
        constant = torch.ones_like(tensor)
        assert printed(constant) != printed(torch.zeros_like(tensor))


@pytest.mark.parametrize("links", [True, False])
def test_what_is_frozen_may_move_while_it_is_written(world, tmp_path, monkeypatch, links):
    """As experts do that go to their own places to be saved, and back."""
    if not links:
        monkeypatch.setattr(writing.os, "link", no_links)
    checkpointer = Checkpointer(world, tmp_path, asynchronous=True)
    root, optimizers = half_frozen()
    for step in (1, 2):
        steps(root, optimizers, [True])
        before = everything(root, optimizers)
        with Gate() as gate, torch.no_grad():
            checkpointer.save(step, root, optimizers, {})
            root.llm.unused.weight.add_(1)
            gate.open.set()
            checkpointer.wait()
            root.llm.unused.weight.sub_(1)
        other, resumed = half_frozen()
        checkpointer.load(step, other, resumed, {})
        assert different(before, everything(other, resumed)) == []


@pytest.mark.parametrize("reason", ["each", "no links", "deleted"])
def test_without_a_link_there_is_a_copy(world, tmp_path, monkeypatch, reason):
    checkpointer = Checkpointer(world, tmp_path, frozen_once=reason != "each")
    root, optimizers = half_frozen()
    checkpointer.save(1, root, optimizers, {})
    if reason == "no links":
        monkeypatch.setattr(writing.os, "link", no_links)
    if reason == "deleted":
        (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    path = checkpointer.save(2, root, optimizers, {})
    assert all(os.stat(file).st_nlink == 1 for file in path.iterdir())
    other, resumed = half_frozen()
    checkpointer.load(2, other, resumed, {})
    assert different(everything(root, optimizers), everything(other, resumed)) == []


def test_u18_all_frozen_is_a_checkpoint_too(world, tmp_path):
    """No parameter group is left, and none is made up on the way back."""
    root, _ = make()
    root.requires_grad_(False)
    recipe = parse_recipe('[modules.llm]\nmodel = "qwen3"', ("--training.steps", "6"))
    assert make_optimizers(recipe, root) is None
    checkpointer = Checkpointer(world, tmp_path)
    checkpointer.save(1, root, None, {"step": 1})
    other, _ = make()
    other.requires_grad_(False)
    with torch.no_grad():
        other.llm.used.weight.zero_()
    assert checkpointer.load(1, other, None, {"step": 0}) == {"step": 1}
    assert different(everything(root, None), everything(other, None)) == []


@pytest.fixture
def referring(tmp_path):
    """A run of digits_single with a frozen encoder that comes from a directory, to which its checkpoints refer."""
    directory = tmp_path / "encoder"
    model = SiglipVisionModel(SiglipVisionConfig(**VISION))
    model.save_pretrained(directory)

    def recipe(*overrides):
        keys = (
            *("--training.local_batch_size", "2", "--training.steps", "4", "--validation.samples", "2"),
            *("--modules.llm.config.num_hidden_layers", "1", "--metrics.enable_tensorboard", "false"),
            *("--modules.vision.initial_load_path", str(directory), "--modules.vision.trainable", "false"),
            *("--checkpoint.enable", "true", "--checkpoint.frozen", "reference"),
            *("--job.dump_folder", str(tmp_path / "run"), *overrides),
        )
        text = re.sub(r"\[modules.vision.config\][^[]*", "", RECIPE.read_text())
        return parse_recipe(text, keys)

    return recipe, directory


@pytest.mark.slow
def test_what_is_frozen_may_stay_where_it_came_from(world, tmp_path, referring):
    recipe, directory = referring
    first = Trainer(resolve(recipe()), world)
    first.train_step()
    first.save()
    first.reporter.close()
    path = tmp_path / "run" / "checkpoint" / "step-1"
    assert not any(key.startswith("model.vision.") for key in Index.of(path).saved)
    expected = first.train_step().loss

    second = Trainer(resolve(recipe()), world)
    assert (second.step, second.train_step().loss) == (1, expected)
    second.reporter.close()
    run = saved_run(tmp_path / "run")
    modules = OneProcess.load(run.recipe, run).modules
    for name, tensor in first.job.root.vision.state_dict().items():
        assert torch.equal(tensor, modules["vision"].state_dict()[name])
        assert torch.equal(tensor, run.read([f"vision.{name}"])[f"vision.{name}"])

    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    says = (
        rf"step-1 refers to the frozen modules\.vision in .*, and {weights} is not what was there; restore it, or name"
    )
    with pytest.raises(CheckpointError, match=says):
        Trainer(resolve(recipe()), world)
    with pytest.raises(CheckpointError, match=says):
        _ = saved_run(tmp_path / "run").names


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_config_in_its_directory(world, referring):
    recipe, directory = referring
    first = Trainer(resolve(recipe("--checkpoint.frozen", "once")), world)
    first.train_step()
    first.save()
    first.reporter.close()
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "layer_norm_eps": 0.5}))
    with pytest.raises(RecipeError, match=r"modules\.vision\.initial_load_path: layer_norm_eps = 0\.5 in its config"):
        Trainer(resolve(recipe("--checkpoint.frozen", "once")), world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("--modules.vision.trainable", "true"), "no module is frozen whole"),
        (("--checkpoint.initial_load_path", "elsewhere"), "gives vision other weights than their directories have"),
    ],
)
def test_references_that_could_not_be_are_refused(referring, overrides, says):
    with pytest.raises(RecipeError, match=rf"checkpoint\.frozen = 'reference': .*{says}"):
        check_run(referring[0](*overrides))


@pytest.mark.slow
def test_what_a_checkpoint_holds_is_not_taken_from_a_directory_later(world, tmp_path, referring):
    """The directory may have other weights by then, which nobody has trained with."""
    recipe, directory = referring
    first = Trainer(resolve(recipe("--checkpoint.frozen", "once")), world)
    first.train_step()
    first.save()
    first.reporter.close()
    SiglipVisionModel(SiglipVisionConfig(**VISION)).save_pretrained(directory)
    for step in (1, 2):
        again = Trainer(resolve(recipe()), world)
        assert again.step == step
        assert different(everything(first.job.root.vision, None), everything(again.job.root.vision, None)) == []
        again.train_step()
        again.save()
        again.reporter.close()
    assert any("vision" in note and "holds" in note for note in again.notes)
