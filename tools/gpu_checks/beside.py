"""Encoders in the collectives of a tensor parallel LLM: steps with `bubble_fill_in_collectives` and without it.

Both take turns in the same two processes, on the same samples. Step times are told and not judged: on GPUs the key has
never been measured, and what is to be expected there is not known. Where both ranks are on one GPU they say nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from gpu_checks.found import Found, Place
from gpu_checks.ranks import run_ranks
from gpu_checks.sizes import EQUAL, LARGE, SMALL, sized
from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer

WARM_UP = 3
LLM: Mapping[str, object] = {
    "parallelism.llm.ranks": '"0-1"',
    "parallelism.llm.data_parallel_shard_degree": 1,
    "parallelism.llm.tensor_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": "bubble_fill",
    "parallelism.pipeline_parallel_microbatch_size": 2,
    "training.local_batch_size": 8,
    "training.global_batch_size": 8,
    "balance.policy": "none",
}
KEY = "parallelism.bubble_fill_in_collectives"
AGREE = 1e-4
"""Relative difference of losses: the first steps are equal but for the order of sums in kernels."""


def run(place: Place) -> Found:
    """Both, for encoders with each kind of parallelism."""
    place.need_kernels("what runs beside collectives")
    kinds = {"data": "data_parallel_replicate_degree", "tensor": "tensor_parallel_degree"}
    left_out = {} if place.on_gpu else {"an encoder with tensor parallelism": "it needs GPUs"}
    cases = []
    for kind, degree in kinds.items() if place.on_gpu else [*kinds.items()][:1]:
        recipes = {key: recipe(place, degree, key) for key in (True, False)}  # the first decides on NCCL's priority
        (case, *_) = run_ranks(steps, 2, place, recipes, place.steps, timeout=400)
        cases.append({"encoder": f"{kind} parallel 2", **case})
        text = (
            "encoder {encoder}: {with_ms:.1f} ms/step with the key, {without_ms:.1f} ms/step without, ratio {ratio:.3f}"
        )
        print(text.format(**cases[-1]), flush=True)
    apart = 0 < place.gpus < 2
    left_out |= {"what it gains": "both ranks are on one GPU"} if apart else {}
    figures = {"cases": cases, "loss_difference": max(case["loss_difference"] for case in cases)}
    return Found(figures, {"loss_difference": AGREE}, left_out)


def recipe(place: Place, degree: str, key: bool) -> Recipe:
    """An encoder and a projector with `degree` 2 on the ranks of the LLM, with the key or without."""
    modules = {f"parallelism.{module}.{degree}": 2 for module in ("vision", "projector")}
    ranks = {f"parallelism.{module}.ranks": '"0-1"' for module in ("vision", "projector")}
    sizes = {**(LARGE if place.on_gpu else SMALL), **EQUAL, **LLM, **ranks, **modules}
    replicas = {"parallelism.vision.data_parallel_replicate_degree": 2 if "data" in degree else 1}
    return sized(sizes, replicas, **({KEY: "true"} if key else {}))


def steps(world: World, recipes: Mapping[bool, Recipe], count: int) -> dict[str, Any]:
    """Median step times of one rank, in milliseconds, and the largest difference of losses in its first steps."""
    seconds: dict[bool, list[float]] = {key: [] for key in recipes}
    difference = 0.0
    with ExitStack() as stack:
        trainers = {}
        for key, each in recipes.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            job = each.job.model_copy(update={"dump_folder": folder})
            trainers[key] = trainer = Trainer(resolve(each.model_copy(update={"job": job})), world)
            stack.callback(trainer.reporter.close)
            stack.callback(trainer.upcoming.close)
        for step in range(WARM_UP + count):
            losses = {}
            for key in list(trainers)[:: 1 if step % 2 else -1]:
                world.accelerator.synchronize()
                started = time.perf_counter()
                losses[key] = trainers[key].train_step().loss
                world.accelerator.synchronize()
                if step >= WARM_UP:
                    seconds[key].append(time.perf_counter() - started)
            if step < WARM_UP:
                difference = max(difference, abs(losses[True] / losses[False] - 1))
    with_ms, without_ms = (1e3 * statistics.median(seconds[key]) for key in (True, False))
    ratio = with_ms / without_ms
    return {"with_ms": with_ms, "without_ms": without_ms, "ratio": ratio, "loss_difference": difference}
