"""A save beside training holds the state of its step, is complete or invisible, and never fails in silence."""

import json
import re
import resource
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.checkpoint import saving
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.saving import PendingSave, SavePlace
from hetmesh.checkpoint.writing import write_index
from hetmesh.errors import CheckpointError
from hetmesh.parallel.apply import Root
from hetmesh.recipe.recipe import load_recipe
from hetmesh.records import checkpoint_folders as folders
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer
from support.checkpoint_pieces import Gate, different, everything, make, steps

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"


def names(folder):
    """What is in a folder; a save that goes on has a name that was never used."""
    return sorted(re.sub(r"\.[0-9a-f]{8}\.partial$", ".partial", path.name) for path in folder.iterdir())


def test_what_is_saved_is_the_state_of_the_step(world, tmp_path):
    """However far training has come when it is written."""
    checkpointer, (root, optimizers) = Checkpointer(world, tmp_path, asynchronous=True), make()
    for step in (1, 2):
        steps(root, optimizers, [True])
        extra = {"step": step, "list": [step]}
        before = everything(root, optimizers)
        with Gate() as gate:
            checkpointer.save(step, root, optimizers, extra)
            extra["list"].append("later")
            steps(root, optimizers, [True])
            torch.rand(1)
            checkpointer.check()  # does not wait
            assert checkpointer.steps() == list(range(1, step))
            gate.open.set()
            checkpointer.wait()
        other, resumed = make()
        found = checkpointer.load(step, other, resumed, {"step": 0, "list": []})
        assert found == {"step": step, "list": [step]}
        assert different(before, everything(other, resumed)) == []
    assert checkpointer.plans.made == 1


def test_a_plan_is_made_again_when_the_state_has_changed(world, tmp_path):
    checkpointer, (root, optimizers) = Checkpointer(world, tmp_path), make()
    for step, both in enumerate([False, False, True, True], 1):  # the other half has moments from step 3 on
        steps(root, optimizers, [both])
        checkpointer.save(step, root, optimizers, {"step": step})
        other, resumed = make()
        checkpointer.load(step, other, resumed, {"step": 0})
        assert different(everything(root, optimizers), everything(other, resumed)) == []
    assert checkpointer.plans.made == 2


def test_old_ones_are_deleted_when_the_new_one_is_complete_and_the_next_save_waits(world, tmp_path):
    checkpointer, (root, optimizers) = Checkpointer(world, tmp_path, keep_latest=1, asynchronous=True), make()
    checkpointer.save(1, root, optimizers, {})
    with Gate() as gate:
        gate.open.set()
        checkpointer.save(2, root, optimizers, {})
        assert checkpointer.steps()[-1:] != []  # step 1, or step 2 already: at no time none
        checkpointer.wait()
        checkpointer.close()  # what is no checkpoint any more is gone a little later
        assert names(tmp_path) == ["step-2"]
        gate.open.clear()
        checkpointer.save(3, root, optimizers, {})
        assert names(tmp_path) == ["step-2", "step-3.partial"]
        gate.open.set()
        checkpointer.save(4, root, optimizers, {})
        assert checkpointer.steps() in ([3], [4])
        checkpointer.wait()
        checkpointer.close()
    assert names(tmp_path) == ["step-4"]


def test_waiting_ends_and_says_for_whom(world, tmp_path):
    checkpointer, (root, optimizers) = Checkpointer(world, tmp_path, timeout=0.2, asynchronous=True), make()
    with Gate():
        checkpointer.save(1, root, optimizers, {})
        with pytest.raises(CheckpointError, match=r"step-1 cannot be written: rank 0 has not written .* within 0\.2 s"):
            checkpointer.save(2, root, optimizers, {})
    assert checkpointer.steps() == []


def test_what_is_named_late_is_whole_and_what_was_given_up_gets_no_name(world, tmp_path, monkeypatch):
    """Rank 0 makes it a checkpoint, or it is removed: whoever comes second hears of it."""
    root, optimizers = make()
    slow, arrived, goes_on = folders.complete, threading.Event(), threading.Event()

    def complete(*args):
        arrived.set()
        assert goes_on.wait(60)
        slow(*args)

    def index(*args):
        arrived.set()
        assert goes_on.wait(60)
        return write_index(*args)

    for where, what, late in ((folders, complete, ["step-1"]), (saving, index, [])):
        folder = tmp_path / what.__name__
        checkpointer = Checkpointer(world, folder, asynchronous=True)
        with monkeypatch.context() as patch:
            patch.setattr(where, what.__name__ if where is folders else "write_index", what)
            checkpointer.save(1, root, optimizers, {})
            pending = checkpointer._pending
            assert arrived.wait(60)
            pending._deadline = 0.0
            with pytest.raises(CheckpointError, match="has not made it complete"):
                checkpointer.wait()
            goes_on.set()
            pending.end(60)
        assert checkpointer.steps() == [1] * len(late)
        assert names(folder) == late
        arrived.clear()
        goes_on.clear()
        for step in checkpointer.steps():
            checkpointer.load(step, root, optimizers, {})


def fail_beside_training(rank, folder):
    """What each rank hears, and when: at which of the calls after the save that goes wrong on rank 2."""
    world = World.current()
    checkpointer = Checkpointer(world, Path(folder), timeout=60.0, asynchronous=True)
    root = Root([(f"rank{rank}", nn.Linear(30, 2))])
    checkpointer.save(1, root, None, {})
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        checkpointer.save(2, root, None, {})
        checkpointer._pending.wait_written()
        checkpointer.check()
    except CheckpointError as error:
        return str(error), names(Path(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpointer.close()
    return "", names(Path(folder))


@pytest.mark.slow
def test_what_goes_wrong_beside_training_is_raised_by_all_at_the_next_step(pool4, tmp_path):
    (told, left), *others = pool4.run(fail_beside_training, str(tmp_path))
    assert all(other == told for other, _ in others)
    assert "step-2 cannot be written: rank 2: OSError: [Errno 27] File too large" in told
    assert told.endswith("the newest complete one is step-1")
    assert left == ["step-1"]


def test_who_leaves_lets_rank_0_name_the_checkpoint(world, tmp_path):
    """Else the end of this rank is that of all, where somebody waits for workers."""
    partial = tmp_path / "step-1.partial"
    partial.mkdir()
    place = SavePlace(tmp_path / "step-1", partial, rank=1, size=2, metadata=None, keep_latest=0, timeout=60.0)
    ready = world.accelerator.event()
    ready.record()
    pending, looks = PendingSave(place, list, ready), []
    pending._given_up.wait = lambda seconds: (looks.append(seconds), len(looks) > 2 and partial.rename(place.path))
    assert pending.leave(60.0) == ""
    assert len(looks) == 3
    assert names(place.path) == ["__1.metadata"]


def test_what_an_earlier_run_still_writes_goes_nowhere(world, tmp_path):
    """Its rank on another machine may outlive the others, and the next run may save the same step."""
    earlier, (root, optimizers) = Checkpointer(world, tmp_path, asynchronous=True), make()
    with Gate() as gate:
        earlier.save(1, root, optimizers, {})
        late = earlier._pending
        Checkpointer(world, tmp_path).prepare()
        later = Checkpointer(world, tmp_path, asynchronous=True)
        later.save(1, root, optimizers, {})
        gate.open.set()
        later.wait()
    assert "No such file or directory" in late.wait_written()
    assert names(tmp_path) == ["step-1"]
    later.load(1, root, optimizers, {})


@pytest.mark.slow
def test_an_error_of_training_lets_the_save_end(world, tmp_path, capsys):
    small = (
        *("--training.local_batch_size", "2", "--training.steps", "4", "--validation.samples", "2"),
        *("--modules.llm.config.num_hidden_layers", "1", "--modules.vision.config.num_hidden_layers", "1"),
        *("--checkpoint.enable", "true", "--checkpoint.interval", "2", "--checkpoint.async_mode", "async"),
        *("--job.dump_folder", str(tmp_path / "run"), "--metrics.enable_tensorboard", "false"),
    )
    with Gate() as gate:

        def on_step(metrics):
            if metrics.step == 3:
                assert names(tmp_path / "run" / "checkpoint") == ["step-2.partial"]
                gate.open.set()
                raise KeyError("a mistake")

        with pytest.raises(KeyError, match="a mistake"):
            Trainer(resolve(load_recipe(RECIPE, small)), world, on_step=on_step).run()
    assert names(tmp_path / "run" / "checkpoint") == ["step-2"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each["step"]) for each in events] == [("started", 0), ("checkpoint", 2), ("ended", 3)]
    summary = Trainer(resolve(load_recipe(RECIPE, small)), world).run()  # goes on, and waits for its last save
    assert summary["steps"] == 4
    assert names(tmp_path / "run" / "checkpoint") == ["step-2", "step-4"]
