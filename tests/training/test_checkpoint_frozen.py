"""Frozen parameters are on the disk once, whatever becomes of the other checkpoints."""

import os

import pytest
import torch
from checkpoint_pieces import different, everything, make, steps

from hetmesh.boundary import init
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.training.checkpoint import Checkpointer
from hetmesh.training.checkpointing import frozen
from hetmesh.training.optimizers import make_optimizers


@pytest.fixture
def world():
    world = init()
    yield world
    world.close()


def half_frozen():
    root, _ = make()
    root.llm.unused.requires_grad_(False)
    return root, make_optimizers(parse_recipe('[modules.llm]\nmodel = "qwen3"', ("--training.steps", "6")), root)


def files(folder):
    """Inode of each file of frozen parameters, by step."""
    return {int(path.parent.name[5:]): path.stat().st_ino for path in folder.glob("step-*/__0_1.distcp")}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_share_what_is_frozen(world, tmp_path, asynchronous):
    checkpointer = Checkpointer(world, tmp_path, keep_latest=2, asynchronous=asynchronous)
    root, optimizers = half_frozen()
    for step in (1, 2, 3):
        steps(root, optimizers, [True])
        checkpointer.save(step, root, optimizers, {})
        checkpointer.wait()
    found = files(tmp_path)
    assert sorted(found) == [2, 3]  # the one that it was written for is gone
    assert len(set(found.values())) == 1
    other, resumed = half_frozen()
    with torch.no_grad():
        other.llm.unused.weight.zero_()
    checkpointer.load(3, other, resumed, {})
    assert different(everything(root, optimizers), everything(other, resumed)) == []


def test_what_has_changed_all_the_same_is_written_again(world, tmp_path):
    checkpointer = Checkpointer(world, tmp_path)
    root, optimizers = half_frozen()
    checkpointer.save(1, root, optimizers, {})
    with torch.no_grad():
        root.llm.unused.weight.add_(1)
    checkpointer.save(2, root, optimizers, {})
    root.llm.unused.bias.requires_grad_(True)  # no longer frozen: in the file of what changes
    checkpointer.save(3, root, optimizers, {})
    assert len(set(files(tmp_path).values())) == 3
    for step in (2, 3):
        other, resumed = half_frozen()
        checkpointer.load(step, other, resumed, {})
        assert torch.equal(other.llm.unused.weight, root.llm.unused.weight)


@pytest.mark.parametrize("reason", ["each", "no links", "deleted"])
def test_without_a_link_there_is_a_copy(world, tmp_path, monkeypatch, reason):
    def no_links(source, target):
        raise PermissionError("this file system knows no links")

    checkpointer = Checkpointer(world, tmp_path, frozen_once=reason != "each")
    root, optimizers = half_frozen()
    checkpointer.save(1, root, optimizers, {})
    if reason == "no links":
        monkeypatch.setattr(frozen.os, "link", no_links)
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
