"""A checkpoint of any layout goes on in any other as if nothing had happened: losses, and state to the last bit."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.boundary import World
from hetmesh.checkpoint.checkpointer import Checkpointer
from hetmesh.checkpoint.reading import Index
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.trainer import Trainer
from support import layout_pairs
from support.checkpoint_pieces import different
from support.layout_pairs import LAYOUTS, MODEL, PIPELINE, VARIANTS, recipe
from support.parity_cases import table

pytestmark = pytest.mark.slow


def go_on(rank, recipe, save_after, steps, again=None):
    """Resume, save once more into `again`, take `steps` steps and save after the first `save_after`: where it was
    resumed, and the losses."""
    trainer = Trainer(resolve(recipe), World.current())
    trainer.reporter.close()
    resumed, losses = trainer.step, []
    if again is not None:
        saver = Checkpointer(trainer.world, Path(again))
        saver.save(trainer.step, trainer.job.root, trainer.optimizers, trainer.checkpoints.state(trainer.progress))
    with exact_dtypes(trainer.job.root):
        for _ in range(steps):
            losses.append(trainer.train_step().loss)
            if len(losses) == save_after:
                trainer.save()
    trainer.upcoming.close()
    return resumed, losses


def run(pool, folder, layout, *arguments, variant="all trained"):
    given = recipe(folder, layout, variant)
    return pool(given.world_size).run(go_on, given, *arguments, timeout=180)


def uninterrupted(pool, folder, steps, variant="all trained", alone=LAYOUTS["one rank"]):
    return run(pool, folder, alone, 0, steps, variant=variant)[0][1]


def content(path):
    """All that a checkpoint holds, tensors whole."""
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else ""
        for name, entry in Index.of(path).saved.items()
    }
    with warnings.catch_warnings():  # that there is one process
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def layouts_aside(state):
    """What does not belong to a layout: all but random states of ranks, and the recipe that names the ranks."""
    return {k: v for k, v in state.items() if not k.startswith("random.") and k != "extra.run"}


def chain(pool, folder, layouts, variant="all trained"):
    """Each layout resumes what the one before it saved, and goes on for two steps, the first of which is saved."""
    losses = run(pool, folder, layouts[0], 2, len(layouts) + 2, variant=variant)[0][1]
    for step, layout in enumerate(layouts[1:], 2):
        again = folder / f"again-{step}"
        for resumed, taken in run(pool, folder, layout, 1, 2, str(again), variant=variant):
            assert resumed == step
            assert taken == pytest.approx(losses[step : step + 2], rel=1e-10), layout
        saved, after = (content(path / f"step-{step}") for path in (folder / "checkpoint", again))
        assert different(layouts_aside(saved), layouts_aside(after)) == []
        shutil.rmtree(again)


CYCLE = ["tp 2, dp 2", "pp 2, fsdp 2", "overlapping, hsdp"]
"""Every axis of a mesh; the exhaustive tests have every pair."""


def test_each_layout_goes_on_from_another_ones_checkpoint(pool, tmp_path):
    chain(pool, tmp_path, [LAYOUTS[name] for name in CYCLE])


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["frozen encoder", "LoRA"])
def test_what_is_frozen_goes_on_in_another_layout(pool, tmp_path, variant):
    chain(pool, tmp_path, [LAYOUTS[name] for name in ("one rank", "overlapping, hsdp", "tp 4")], variant)


@pytest.mark.exhaustive
def test_ranks_that_share_key_heads_go_on_from_others_and_others_from_them(pool, tmp_path):
    chain(pool, tmp_path, [LAYOUTS[name] for name in ("tp 2, dp 2", "tp 4", "one rank")], "2 key heads")


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_every_pair_of_layouts(pool, tmp_path, first, variant):
    losses = uninterrupted(pool, tmp_path / "whole", 5, variant)
    run(pool, tmp_path, LAYOUTS[first], 2, 2, variant=variant)
    for second in LAYOUTS.keys() - {first}:
        for resumed, taken in run(pool, tmp_path, LAYOUTS[second], 0, 3, variant=variant):
            assert resumed == 2
            assert taken == pytest.approx(losses[2:], rel=1e-10), second


def test_what_is_loaded_is_saved_again_to_the_last_bit(pool, tmp_path):
    """Equal keys and exact state (the comparator of Megatron-LM's PR #6743), random states and the recipe included."""
    layout = LAYOUTS["overlapping, hsdp"]
    run(pool, tmp_path, layout, 2, 2)
    run(pool, tmp_path, layout, 0, 0, str(tmp_path / "again"))
    before, after = content(tmp_path / "checkpoint" / "step-2"), content(tmp_path / "again" / "step-2")
    assert different(before, after) == []
    parameters = {name.removeprefix("model.") for name in before if name.startswith("model.")}
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        assert {f"optimizer.state.{name}.{moment}" for name in parameters} <= before.keys()
    others = {f"random.{rank}.cpu" for rank in range(4)} | {"extra.sample", "extra.run", "lr_scheduler.last_epoch"}
    assert others <= before.keys()
    wrong = dict(after)
    for name in ("optimizer.state.llm.lm_head.weight.exp_avg_sq", "random.3.cpu", "extra.sample"):
        wrong[name] = wrong[name] + 1
        assert different(before, wrong) == [name]  # so it sees what it should
        wrong[name] = after[name]


DEEP = MODEL.replace("num_hidden_layers = 3", "num_hidden_layers = 7")
THREE = {  # section 4 of the peers' cases, of enc | LLM: (tp, pp)
    "2 | 2, 3": [table("vision", "0-1", tp=2), table("llm", "2-7", tp=2, pp=3) + f"\n{PIPELINE}"],
    "1 | 1, 7": [table("vision", "0"), table("llm", "1-7", pp=7) + f"\n{PIPELINE}"],
    "2, 2 | 2, 2": [table("vision", "0-3", tp=2, pp=2), table("llm", "4-7", tp=2, pp=2) + f"\n{PIPELINE}"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [(0, 1, 2, 0), (0, 2, 1, 0)], ids=["forth", "back"])
def test_megatron_checkpoints_in_every_ordered_pair_of_three_layouts(pool, tmp_path, order, monkeypatch):
    """Where Megatron-LM's `test_mimo_checkpoint.py` loads what the same layout saved. Each pair is in one order."""
    monkeypatch.setattr(layout_pairs, "MODEL", DEEP)
    chain(pool, tmp_path, [list(THREE.values())[i] for i in order])
