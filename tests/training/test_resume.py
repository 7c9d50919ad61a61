"""U13: a run that is killed between steps and resumed is, to the last bit, the run that was not."""

import json
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from hetmesh.data.digits import DigitsSource
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import load_recipe

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
BATCH, STEPS, KILLED_AFTER = 8, 9, 5
SMALL = (
    *("--training.steps", str(STEPS)),
    *("--lr_scheduler.warmup_steps", "2", "--validation.freq", "3", "--validation.samples", "10"),
    *("--data.source", "faulty_sources:FaultyDigits", "--checkpoint.interval", "3"),
    *("--balance.policy", "none"),  # so that it is known which lane loads the sample that kills
    # so that random state matters, and evaluating must not touch it
    *("--modules.vision.config.attention_dropout", "0.2"),
)
LAYOUTS = {
    # rank 2 holds a replica of the encoder and a half of the LLM's and the projector's layers
    "digits_overlapping": (
        *("--parallelism.llm.data_parallel_replicate_degree", "1", "--parallelism.llm.tensor_parallel_degree", "2"),
    ),
    "digits_bubble_fill": ("--parallelism.llm.pipeline_parallel_microbatch_size", "2"),
}
EXACT = ("step", "loss", "grad_norm", "lr")


def curve(folder: Path) -> list[tuple]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in EXACT) for line in lines]


@pytest.mark.parametrize(
    "name", ["digits_overlapping", pytest.param("digits_bubble_fill", marks=pytest.mark.exhaustive)]
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(start_training, tmp_path, name):
    whole, killed, recipe = tmp_path / "whole", tmp_path / "killed", RECIPES / f"{name}.toml"
    lanes = load_recipe(recipe, LAYOUTS[name]).lanes
    small = (*SMALL, *LAYOUTS[name], "--training.local_batch_size", str(BATCH // lanes))
    uninterrupted = start_training(recipe, *small, "--job.dump_folder", str(whole))

    # The first lane of the encoder is on rank 0, which also writes metrics.jsonl.
    first_of_next_step = Loader(DigitsSource(), BATCH).indices(KILLED_AFTER)[0]
    saving = (*small, "--job.dump_folder", str(killed), "--checkpoint.enable", "true")
    fault = ("--data.options.fault", "kill", "--data.options.at", str(first_of_next_step))
    process = start_training(recipe, *saving, *fault)
    out, err = process.communicate(timeout=300)
    assert process.returncode == -9, out + err
    assert [step for step, *_ in curve(killed)] == list(range(1, KILLED_AFTER + 1))
    checkpoints = killed / "checkpoint"
    assert [path.name for path in checkpoints.iterdir()] == ["step-3"]

    # What a kill in the middle of a save, and in the middle of a line, leaves behind.
    (checkpoints / "step-5").mkdir()
    (checkpoints / "step-5" / "__0_0.distcp").write_bytes(b"half")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')

    resumed = start_training(recipe, *saving)
    for process in (resumed, uninterrupted):
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, ""), out + err
    assert curve(killed) == curve(whole)
    assert len(curve(whole)) == STEPS
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (killed, whole)]
    for summary in summaries:
        del summary["train_seconds"]
    assert summaries[0] == summaries[1]

    # The last checkpoint holds everything: each rank's parts, under every name.
    saved = FileSystemReader(str(checkpoints / "step-9")).read_metadata().state_dict_metadata
    parameters = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    assert {name.split(".")[0] for name in parameters} == {"vision", "projector", "llm"}
    for name in parameters:
        assert {f"optimizer.state.{name}.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} <= set(saved)
    assert {f"random.{rank}.cpu" for rank in range(4)} <= set(saved)
