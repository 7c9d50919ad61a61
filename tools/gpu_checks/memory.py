"""Peak memory of a step as measured, beside what `hetmesh dryrun` says and what `explain` and `simulate` predict.

On CUDA the allocator is asked; on a CPU live bytes of tensors are counted. On the fake accelerator the dry run stands
for the measurement, at full size. All batches are equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from gpu_checks.found import Found, Place
from gpu_checks.ranks import run_ranks
from gpu_checks.sizes import EQUAL, LARGE, ONE_RANK, SMALL, TWO_RANKS, sized
from hetmesh.boundary import World
from hetmesh.cost import load_machine
from hetmesh.dryrun.dry_run import dry_run
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.predictions import step_memory
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import LiveBytes
from hetmesh.training.trainer import Trainer

WARM_UP = 2
"""Steps before the one whose peak is measured: optimizer state and buffers are there by then."""
ERROR = 0.1
LAYOUTS = {"one rank": ONE_RANK, "FSDP 2, encoder data parallel 2": TWO_RANKS}
AS_WRITTEN = "the 8B recipe, two microbatches"


def run(place: Place) -> Found:
    """The largest errors of the predictions and of the dry run."""
    recipes = {name: sized({**_sizes(place), **EQUAL}, layout) for name, layout in LAYOUTS.items()}
    if place.device == "fake":
        recipes[AS_WRITTEN] = sized(EQUAL, {"training.global_batch_size": 16})
    cases = [case for name, recipe in recipes.items() for case in _cases(name, recipe, place)]
    figures: dict[str, Any] = {"cases": cases}
    for which in ("prediction", "dry_run"):
        errors = [case[f"{which}_error"] for case in cases if f"{which}_error" in case]
        figures |= {f"{which}_error": max(errors)} if errors else {}
    left_out = {"a measurement": "nothing is allocated: the dry run stands for it"} if place.device == "fake" else {}
    return Found(figures, {key: ERROR for key in figures if key.endswith("_error")}, left_out)


def _sizes(place: Place) -> Mapping[str, object]:
    return SMALL if place.device == "cpu" else LARGE


def _cases(name: str, recipe: Recipe, place: Place) -> list[dict[str, Any]]:
    """Of every rank; the dry run is that of the first, which is like all others here."""
    most = dry_run(resolve(recipe), 0).peak
    explained = predicted(recipe)
    if place.device == "fake":
        measured: list[dict[str, Any]] = [{"peak_bytes": most}]
    else:
        measured = run_ranks(peaks, recipe.world_size, place, recipe, timeout=280)
    cases = []
    for rank, each in enumerate(measured):
        peak = each["peak_bytes"]
        case = {"layout": name, "rank": rank, **each, "predicted_bytes": explained[rank]}
        case["prediction_error"] = abs(explained[rank] / peak - 1)
        told = f"{name}, rank {rank}: {peak / 1e6:,.1f} MB, predicted {explained[rank] / 1e6:,.1f} MB"
        if place.device != "fake":
            case |= {"dry_run_bytes": most, "dry_run_error": abs(most / peak - 1)}
            told += f", dry run {most / 1e6:,.1f} MB"
        print(told, flush=True)
        cases.append(case)
    return cases


def predicted(recipe: Recipe) -> list[int]:
    """Bytes that tensors of each rank take at most in a step, as `hetmesh explain` predicts them."""
    resolved = resolve(recipe)
    drawn = resolved.loader().batch(0)
    plan = resolved.plan(drawn.metas)
    model = recipe_step_model(recipe, resolved.graph, resolved.shapes, machine=load_machine("h100"))
    memory = step_memory(resolved, model, plan)
    return [memory[rank].tensors for rank in range(recipe.world_size)]


def peaks(world: World, recipe: Recipe) -> dict[str, Any]:
    """What one rank holds at most in a step, and behind it."""
    on_gpu = world.device.type == "cuda"
    live = None if on_gpu else LiveBytes()
    with tempfile.TemporaryDirectory() as folder, live or nullcontext():
        job = recipe.job.model_copy(update={"dump_folder": folder})
        trainer = Trainer(resolve(recipe.model_copy(update={"job": job})), world)
        try:
            for _ in range(WARM_UP):
                trainer.train_step()
            world.accelerator.synchronize()
            if live is None:
                torch.cuda.reset_peak_memory_stats()
            else:
                live.restart()
            trainer.train_step()
            world.accelerator.synchronize()
        finally:
            trainer.upcoming.close()
            trainer.reporter.close()
    if live is not None:
        return {"peak_bytes": live.peak, "after_bytes": live.live}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "after_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
