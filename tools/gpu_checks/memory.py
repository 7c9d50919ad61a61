"""Peak memory of a step as measured, beside what `hetmesh explain` and `simulate` predict, and a dry run.

On CUDA the allocator is asked; on a CPU live bytes of tensors are counted. A fake accelerator has the dry run's alone.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import torch

from gpu_checks.found import Found, Place
from gpu_checks.ranks import run_ranks
from gpu_checks.sizes import LARGE, ONE_RANK, SMALL, TWO_RANKS, sized
from hetmesh.balance import plan_batch
from hetmesh.boundary import World
from hetmesh.cost import load_machine
from hetmesh.recipe.recipe import Recipe
from hetmesh.runtime import LiveBytes
from hetmesh.simulate import simulate
from hetmesh.training.balance import recipe_balance
from hetmesh.training.job import describe, make_loader
from hetmesh.training.recipe_schedule import StepSchedules
from hetmesh.training.step_model import recipe_step_model
from hetmesh.training.trainer import Trainer

STEP = 2
"""The step, counted from 0, whose peak is measured: optimizer state and buffers are there by then."""
ERROR = 0.1
LAYOUTS = {"one rank": ONE_RANK, "FSDP 2, encoder data parallel 2": TWO_RANKS}


def run(place: Place) -> Found:
    """The largest error of each prediction."""
    place.need_kernels("measured memory")
    cases = []
    for name, layout in LAYOUTS.items():
        recipe = sized(LARGE if place.on_gpu else SMALL, layout)
        most = run_ranks(peaks, recipe.world_size, place, recipe, timeout=280)
        explained = predicted(recipe)
        for rank, each in enumerate(most):
            error = abs(explained[rank] / each["peak_bytes"] - 1)
            cases.append({"layout": name, "rank": rank, **each, "predicted_bytes": explained[rank], "error": error})
            print(
                f"{name}, rank {rank}: {each['peak_bytes'] / 1e6:,.1f} MB, predicted {explained[rank] / 1e6:,.1f} MB",
                flush=True,
            )
    return Found(
        {"cases": cases, "prediction_error": max(case["error"] for case in cases)}, {"prediction_error": ERROR}
    )


def predicted(recipe: Recipe) -> list[int]:
    """Bytes that each rank holds at most in step `STEP`."""
    source, adapters, graph = describe(recipe)
    drawn = make_loader(recipe, source, graph, adapters).batch(STEP)
    plan = plan_batch(graph, drawn.metas, recipe.batch.microbatch_size, recipe_balance(recipe, graph, adapters))
    schedule = StepSchedules(recipe, graph, adapters).of(plan)
    costs = recipe_step_model(recipe, graph, adapters, machine=load_machine("h100")).costs(plan, schedule)
    timeline = simulate(schedule, costs)
    return [timeline.peak_bytes[timeline.track_of(rank)] for rank in range(recipe.world_size)]


def peaks(world: World, recipe: Recipe) -> dict[str, Any]:
    """What one rank holds at most in step `STEP`, and after it."""
    on_gpu = world.device.type == "cuda"
    live = None if on_gpu else LiveBytes()
    with tempfile.TemporaryDirectory() as folder, live or nullcontext():
        job = recipe.job.model_copy(update={"dump_folder": folder})
        trainer = Trainer(recipe.model_copy(update={"job": job}), world)
        try:
            for _ in range(STEP):
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
