"""One rank's real step of an 8B model on a fake device: host waits, memory beside the prediction, seconds.

Two layouts of recipes/siglip_qwen3_8b.toml: its own (tensor parallel 4 x FSDP 2, 8 microbatches), and context parallel
4 with a pipeline of two stages and FSDP 2 over samples of up to 32,768 tokens. Of each the rank that is predicted to
hold most takes a whole step, for all figures but `seconds`, which are those of building and of two microbatches, and
`peak_while_building_over_shard`, for which weights are drawn, of two layers of each module.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetmesh.dryrun.dry_run import fullest_group, with_microbatches
from hetmesh.recipe.recipe import Recipe, load_recipe

JUDGES = (
    "src/hetmesh/cost",
    "src/hetmesh/simulate",
    "src/hetmesh/runtime",
    "src/hetmesh/parallel",
    "src/hetmesh/dryrun/dry_run.py",
    "src/hetmesh/resolve/recipe_step_model.py",
)
"""What an output of it judges (`kept.py`)."""

RECIPE = Path(__file__).parents[2] / "recipes" / "siglip_qwen3_8b.toml"

LONG = {
    "parallelism.vision.ranks": "0-15",
    "parallelism.vision.data_parallel_replicate_degree": "16",
    "parallelism.llm.ranks": "0-15",
    "parallelism.llm.tensor_parallel_degree": "1",
    "parallelism.llm.context_parallel_degree": "4",
    "parallelism.llm.pipeline_parallel_degree": "2",
    "parallelism.llm.pipeline_parallel_schedule": "three_phase",
    "parallelism.llm.pipeline_parallel_microbatch_size": "1",
    "training.local_batch_size": "4",
    "training.global_batch_size": "8",
    "training.seq_len": "32768",
    "data.options.text_tokens": "[16384, 29800]",
}
CASES: dict[str, dict[str, str]] = {"tensor parallel 4 x FSDP 2": {}, "context parallel 4, pipeline 2, 32k": LONG}

TARGETS = {
    "sync_d2h_per_step": 2,
    "sync_h2d_per_step": 0,
    "timed_waits": 0,
    "peak_while_building_over_shard": 1.2,
    "memory_error": 0.10,
    "seconds": 120,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--layers", type=int, help="of each module, instead of the model's own: a quick look")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, and the worst of each figure."""
    torch.set_num_threads(1)
    cases = {name: _case(_recipe(changes, args.layers), _recipe(changes, 2)) for name, changes in CASES.items()}
    worst = {key: max(case[key] for case in cases.values()) for key in TARGETS}
    return {**worst, "within_targets": all(worst[key] <= most for key, most in TARGETS.items()), "cases": cases}


def _recipe(changes: dict[str, str], layers: int | None) -> Recipe:
    keys = dict(changes)
    for module in ("vision", "llm") if layers else ():
        keys[f"modules.{module}.config.num_hidden_layers"] = str(layers)
    return load_recipe(RECIPE, _overrides(keys))


def _overrides(keys: dict[str, str]) -> Sequence[str]:
    return [part for key, value in keys.items() for part in (f"--{key}", value)]


def _case(recipe: Recipe, small: Recipe) -> dict[str, Any]:
    started = time.perf_counter()
    drawn = fullest_group(small, draws=True).run
    fewest = max(2, recipe.training.local_batch_size // recipe.batch.microbatch_size)
    run = fullest_group(with_microbatches(recipe, fewest)).run
    seconds = run.build_seconds + 2 * run.seconds / run.microbatches
    whole = fullest_group(recipe)
    run = whole.run
    return {
        "rank": run.rank,
        "microbatches": run.microbatches,
        "sync_d2h_per_step": run.waiting("device_to_host"),
        "sync_h2d_per_step": run.waiting("host_to_device", within=True),
        "timed_waits": run.timed_waits,
        "peak_while_building_over_shard": drawn.built_peak / drawn.built,
        "memory_error": whole.memory_error,
        "peak_bytes": run.peak,
        "predicted_bytes": whole.predicted.tensors,
        "state_bytes": run.state,
        "left_behind_bytes": run.live - run.state,
        "first_checks_bytes": run.first_checks,
        "seconds": seconds,
        "step_seconds": run.seconds,
        "all_seconds": time.perf_counter() - started,
    }


def table(result: dict[str, Any]) -> str:
    """Figures beside their targets."""
    names = list(result["cases"])
    lines = [f"{'':32}{'worst':>12}{'target':>12}" + "".join(f"  {name}" for name in names)]
    for key, most in TARGETS.items():
        each = "".join(f"  {result['cases'][name][key]:>{len(name)}.4g}" for name in names)
        lines.append(f"{key:32}{result[key]:>12.4g}{most:>12}{each}")
    return "\n".join(lines)
