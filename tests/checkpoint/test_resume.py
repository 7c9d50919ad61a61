"""U13: a run that is ended anywhere and started again is, to the last bit, the run that was not."""

import json
import re
import signal
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from hetmesh.recipe.recipe import load_recipe
from hetmesh.records.checkpoint_folders import complete_steps
from hetmesh.records.run_view import read_run
from support.signal_points import SignalPoint

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
BATCH, STEPS = 8, 8
SMALL = (
    *("--training.steps", str(STEPS), "--modules.llm.config.num_hidden_layers", "2"),
    *("--lr_scheduler.warmup_steps", "2", "--validation.freq", "3", "--validation.samples", "10"),
    # so that random state matters, and evaluating must not touch it
    *("--modules.vision.config.attention_dropout", "0.2"),
)
LAYOUTS = {
    # rank 1 holds a replica of the encoder and a half of the LLM's and the projector's layers
    "digits_overlapping": (
        *("--parallelism.vision.ranks", "[0, 1]", "--parallelism.vision.data_parallel_replicate_degree", "2"),
        *("--parallelism.llm.ranks", "[1, 2]"),
        *("--parallelism.llm.data_parallel_replicate_degree", "1", "--parallelism.llm.tensor_parallel_degree", "2"),
    ),
    "digits_bubble_fill": ("--parallelism.llm.pipeline_parallel_microbatch_size", "2"),
}
EXACT = ("step", "loss", "grad_norm", "lr")
# What ends each start, its exit status, and the steps whose checkpoints are complete then. A checkpoint is due at every
# second step, and the two newest are kept.
ENDS = {
    "in a step, when one rank's optimizer has moved": (
        SignalPoint("hetmesh.training.trainer:take_step", rank=1, call=3, after=True, to="group"),
        (-signal.SIGKILL, [2]),
    ),
    "between two ranks' writes": (SignalPoint("hetmesh.checkpoint.saving:write_report", rank=1), (1, [2])),
    "of a process that loads samples": (
        SignalPoint("hetmesh.data.payloads:SplitSources.load", rank=1, call=10),
        (1, [2]),
    ),
    "before the rename": (
        SignalPoint("hetmesh.records.checkpoint_folders:complete", to="group"),
        (-signal.SIGKILL, [2]),
    ),
    "after the rename, before old ones are deleted": (
        SignalPoint("hetmesh.records.checkpoint_folders:retire_old", call=2, to="group"),
        (-signal.SIGKILL, [2, 4, 6]),
    ),
    "during loading": (SignalPoint("hetmesh.checkpoint.checkpointer:read_into", rank=1, after=True), (1, [2, 4, 6])),
    "by SIGTERM to one rank": (
        SignalPoint("hetmesh.training.trainer:Trainer.train_step", rank=2, number=signal.SIGTERM),
        (128 + signal.SIGTERM, [6, 7]),
    ),
    "in the last evaluation": (SignalPoint("hetmesh.training.validation:evaluate", rank=1), (1, [7, 8])),
}
OFTEN = {
    "in a step, when one rank's optimizer has moved",
    "after the rename, before old ones are deleted",
    "during loading",
    "by SIGTERM to one rank",
    "in the last evaluation",
}
ASYNC = {
    "between two ranks' writes",
    "of a process that loads samples",
    "after the rename, before old ones are deleted",
    "by SIGTERM to one rank",
}
LOADER = r"error: rank 1: a process that loads samples has died while it was at sample 'digits/\w+/\d+': .*\n"


def evaluations(folder: Path) -> list[tuple]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["validation"]["loss"]) for line in lines if "validation" in line]


def curve(folder: Path) -> list[tuple]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [tuple(line[key] for key in EXACT) for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("digits_overlapping", OFTEN),
        pytest.param("digits_overlapping", ENDS, marks=pytest.mark.exhaustive),
        pytest.param("digits_bubble_fill", ENDS, marks=pytest.mark.exhaustive),
    ],
    ids=["often", "overlapping", "bubble_fill"],
)
def test_a_run_that_is_ended_anywhere_equals_an_uninterrupted_one(start_training, tmp_path, name, ends):
    whole, ended, recipe = tmp_path / "whole", tmp_path / "ended", RECIPES / f"{name}.toml"
    described = load_recipe(recipe, LAYOUTS[name])
    small = (*SMALL, *LAYOUTS[name], "--training.local_batch_size", str(BATCH // described.lanes))
    uninterrupted = start_training(recipe, *small, "--job.dump_folder", str(whole), "--checkpoint.enable", "false")

    checkpoints, metrics = ended / "checkpoint", ended / "metrics.jsonl"
    saving = (*small, "--job.dump_folder", str(ended), "--checkpoint.enable", "true", "--checkpoint.interval", "2")
    saving = (*saving, "--checkpoint.keep_latest_k", "2")
    for when, (point, expected) in ENDS.items():
        if when not in ends:
            continue
        mode = ("--checkpoint.async_mode", "async" if when in ASYNC else "disabled")
        loaders = ("--data.num_workers", "1" if "loads" in when else "0")
        process = start_training(recipe, *saving, *mode, *loaders, points=(point,))
        out, err = process.communicate(timeout=300)
        assert (process.returncode, complete_steps(checkpoints)) == expected, (when, out, err)
        said = {1: r"error: rank 1: ended by signal SIGKILL \(out of memory\?\)\n", 143: "interrupted\n"}
        told = LOADER if "loads" in when else said.get(process.returncode, "")
        assert re.fullmatch(told, err), (when, err)
        if process.returncode == 143:
            assert "stopped by SIGTERM after step 7: checkpoint saved; rerun the same command to resume\n" in out
        for cut in (metrics, ended / "events.jsonl"):  # what a kill in the middle of a line leaves behind
            with cut.open("a") as file:
                file.write('{"step": 6, "lo')

    resumed = start_training(recipe, *saving)
    for process in (resumed, uninterrupted):
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, ""), out + err
    assert curve(ended) == curve(whole)
    assert len(curve(whole)) == STEPS
    assert evaluations(ended) == evaluations(whole)  # that of step 6 too, between which and its save all were killed
    assert [step for step, _ in evaluations(whole)] == [3, 6, 8]
    story = read_run(ended).story  # what a rank still says that others end is chance
    assert {6, 7, 8} <= {start.step for start in story.starts}
    assert "stopped" in {start.how for start in story.starts if start.step == 6}
    assert (story.starts[-1].step, story.starts[-1].how) == (8, "finished")
    assert story.writing is False
    assert {2, 7, 8} <= set(story.saved)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (ended, whole)]
    for summary in summaries:
        del summary["train_seconds"]
    assert summaries[0] == summaries[1]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-7", "step-8"]

    # The last checkpoint holds everything: each rank's parts, under every name.
    saved = FileSystemReader(str(checkpoints / "step-8")).read_metadata().state_dict_metadata
    parameters = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    assert {name.split(".")[0] for name in parameters} == {"vision", "projector", "llm"}
    for name in parameters:
        assert {f"optimizer.state.{name}.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} <= set(saved)
    assert {f"random.{rank}.cpu" for rank in range(described.world_size)} <= set(saved)
