"""Two ranks with experts of their own, the encoder beside them: predicted against measured step time and peak memory.

`predicted_step_error` is as in `plans`: whole steps in real processes, each rank on a core of its own with one thread,
against a simulation of the same batch with costs of this machine and other samples: each stage by itself at other
microbatch sizes, its exchange of tokens included, sums and the optimizer by themselves, and what two busy cores slow
each other down. Measuring and running take turns.

`predicted_memory_error` is of the most bytes of tensors that are alive on a rank in a step, the worse of both ranks,
against the prediction of `hetmesh simulate`, which takes routing to be even; `experts_max_over_mean` says how even it
was.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.busy import Sizes, busy_slowdown
from benchmarks.plans import predict, undisturbed
from benchmarks.plans.steps import measure
from hetmesh.boundary import World
from hetmesh.cost import load_machine
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.runtime import LiveBytes
from hetmesh.simulate import simulate
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.trainer import Trainer

JUDGES = ("src/hetmesh/cost", "src/hetmesh/simulate", "src/hetmesh/parallel/experts")
"""What an output of it judges (`kept.py`)."""

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_moe.toml"
STEP = 2  # whose peak is measured: optimizer state and buffers are there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--features", type=int, default=256, help="of the LLM (default %(default)s)")
    parser.add_argument("--inner", type=int, default=256, help="features inside an expert (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the LLM (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=8, help="samples of a lane (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=24, help="turns of measuring and running (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring per round (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and predict."""
    recipe, size = recipe_of(args), args.microbatch
    busy = Sizes(args.features, args.features * 11 // 4, layers=args.layers)
    fitted = [max(size // 2, 1), 3 * size // 2, 2 * size]  # none of them the recipe's own
    with WorkerPool(2) as pool:
        ranks = pool.run(measure, [recipe], [fitted], args.rounds, args.seconds, busy, timeout=900)
        memory = pool.run(peak_bytes, recipe, timeout=300)
    steps = [found for (found,), _ in ranks]
    slowdown = busy_slowdown(([undisturbed(alone)], [undisturbed(together)]) for _, (alone, together) in ranks)
    predicted = predict(recipe, steps, slowdown)
    each = [max(both) for both in zip(*(rank.seconds for rank in steps), strict=True)]
    measured, expected = statistics.median(each), predicted_bytes(recipe)
    errors = [abs(peak / held - 1) for peak, (held, _) in zip(expected, memory, strict=True)]
    return {
        "predicted_step_error": abs(predicted / measured - 1),
        "predicted_memory_error": max(errors),
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "predicted_bytes": expected,
        "measured_bytes": [held for held, _ in memory],
        "experts_max_over_mean": max(spread for _, spread in memory),
        "busy_slowdown": slowdown[-1],
        "steps_ms": [round(1e3 * seconds, 1) for seconds in each],
    }


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe: EP 2, and the encoder data parallel on the same two ranks, in four microbatches."""
    config = {
        "hidden_size": args.features,
        "head_dim": args.features // 4,
        "moe_intermediate_size": args.inner,
        "num_hidden_layers": args.layers,
    }
    return load_recipe(
        RECIPE,
        [
            "--parallelism.llm.ranks=0-1",
            *(f"--modules.llm.config.{key}={value}" for key, value in config.items()),
            f"--training.local_batch_size={args.microbatch}",
            f"--training.global_batch_size={2 * 4 * args.microbatch}",
            "--metrics.enable_tensorboard=false",
            "--metrics.log_freq=1",
            "--validation.freq=1000000",
        ],
    )


def predicted_bytes(recipe: Recipe) -> list[int]:
    """Per rank the most in step `STEP`, counting from 0; rates matter nothing to it."""
    resolved = resolve(recipe)
    graph = resolved.graph
    drawn = resolved.loader().batch(STEP)
    plan = resolved.plan(drawn.metas)
    schedule = recipe_schedule(recipe, graph, plan.routes)
    model = recipe_step_model(recipe, graph, resolved.shapes, machine=load_machine("h100"))
    timeline = simulate(schedule, model.costs(plan, schedule))
    return [timeline.peak_bytes[timeline.track_of(rank)] for rank in range(recipe.world_size)]


def peak_bytes(rank: int, recipe: Recipe) -> tuple[int, float]:
    """The most bytes of tensors of one rank in step `STEP`, and how even the routing of the steps was."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, LiveBytes() as live:
        job = recipe.job.model_copy(update={"dump_folder": folder})
        trainer = Trainer(resolve(recipe.model_copy(update={"job": job})), World.current())
        try:
            for _ in range(STEP):
                trainer.train_step()
            live.restart()
            trainer.job.runtime.live_bytes = live
            found = trainer.train_step()
        finally:
            trainer.upcoming.close()
            trainer.reporter.close()
    loads = found.measured.experts if found.measured is not None else {}  # on the rank that logs
    return live.peak, max((load["max_over_mean"] for load in loads.values()), default=0.0)


def table(result: dict[str, Any]) -> str:
    """Two lines."""
    mb = [" / ".join(f"{size / 1e6:.1f}" for size in result[key]) for key in ("predicted_bytes", "measured_bytes")]
    return (
        f"step     predicted {result['predicted_ms']:.1f} ms, measured {result['measured_ms']:.1f} ms, error "
        f"{result['predicted_step_error']:.1%}; busy_slowdown {result['busy_slowdown']:.3f}\n"
        f"memory   predicted {mb[0]} MB, measured {mb[1]} MB, error {result['predicted_memory_error']:.1%}; experts "
        f"max/mean {result['experts_max_over_mean']:.2f}"
    )
