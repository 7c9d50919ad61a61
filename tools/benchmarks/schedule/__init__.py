"""Predicted against measured makespan of training steps on two pinned ranks, costs fitted at other shapes.

Configurations of one small VLM, packed and context-parallel ones among them, each rank on a core of its own with one
thread. Every rank times its stages by themselves at other microbatch sizes, both ranks at the same time, through the
code that the runtime uses; each part of each stage becomes a quadratic of its tokens, and the simulator runs the step's
schedule with these seconds, less what busy cores slow each other down (`benchmarks.busy`): where only one of them
works, it is faster. Ranks that share tokens run their stage together, fetches included. Measuring and running take
turns, because a machine's speed drifts, and medians are kept. A makespan is from the first action to the last on any
rank; the optimizer is not part of it.

With `--profile-seconds`, what `hetmesh profile` fits, layer by layer, makes a second prediction (`profile_error`).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.busy import Sizes, apart, busy_slowdown
from benchmarks.schedule.predict import step_costs, with_links
from benchmarks.schedule.recipes import CONFIGURATIONS, Configuration
from benchmarks.schedule.stages import Measured, measure, profile
from hetmesh.balance import plan_batch
from hetmesh.cost import Profile
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import Recipe
from hetmesh.schedule import Schedule
from hetmesh.simulate import Timeline, average_bubbles, simulate
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.describe import make_prepare
from hetmesh.training.job import describe
from hetmesh.training.recipe_schedule import recipe_schedule
from hetmesh.training.step_model import recipe_step_model

JUDGES = ("src/hetmesh/cost", "src/hetmesh/schedule", "src/hetmesh/simulate", "src/hetmesh/runtime")
"""What an output of it judges (`kept.py`)."""

NAMES = tuple(c.name for c in CONFIGURATIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--width", type=int, default=192, help="of the LLM and the encoder (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the LLM, at least 4 (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=4, help="samples per microbatch (default %(default)s)")
    parser.add_argument(
        "--fit", type=int, nargs="+", default=[2, 6, 8], help="samples per microbatch that are fitted (default 2 6 8)"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of measuring and running (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1, help="steps per round (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring per round (default %(default)s)")
    parser.add_argument("--profile-seconds", type=float, default=0.0, help="of `hetmesh profile`'s way; 0: not")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all configurations."""
    if args.microbatch in args.fit:
        raise SystemExit(f"--fit {args.fit} must not hold what is run, --microbatch {args.microbatch}")
    sizes = {"width": args.width, "llm_layers": args.layers, "microbatches": args.microbatches}
    busy = Sizes(args.width, args.width * 11 // 4, layers=args.layers, samples=args.microbatch)
    chosen = [c for c in CONFIGURATIONS if c.name in args.only]
    results, timelines, profiled = [], {}, None
    with WorkerPool(2) as pool:
        if args.profile_seconds:
            recipe = CONFIGURATIONS[0].recipe(microbatch=2 * args.microbatch, **sizes)  # which holds out half of it
            profiled = pool.run(profile, recipe, args.profile_seconds, timeout=600)[0]
        for configuration in chosen:
            recipe = configuration.recipe(microbatch=args.microbatch, **sizes)
            options = (args.fit, args.rounds, args.seconds, args.steps, busy)
            measured = pool.run(measure, recipe, *options, timeout=900)
            entry, pair = _compare(configuration, recipe, measured, profiled)
            results.append(entry)
            timelines[configuration.name] = pair
    return {"max_prediction_error": max(r["error"] for r in results), "configurations": results}


def _compare(
    configuration: Configuration, recipe: Recipe, measured: list[Measured], profiled: Profile | None
) -> tuple[dict[str, Any], tuple[Timeline, Timeline]]:
    source, adapters, graph = describe(recipe)
    loader = Loader(
        source, recipe.batch.global_batch_size, make_prepare(recipe, graph, adapters), seed=recipe.debug.seed
    )
    plan = plan_batch(graph, [d.meta for d in loader.batch(0)], recipe.batch.microbatch_size)
    schedule = recipe_schedule(recipe, graph, plan.routes)
    slowdown = busy_slowdown(each.busy for each in measured)
    costs = apart(step_costs(measured, plan, schedule), slowdown)
    predicted, (real, seconds) = simulate(schedule, costs), _median_step(schedule, measured)
    entry = {
        "name": configuration.name,
        "predicted_ms": 1e3 * predicted.makespan,
        "measured_ms": 1e3 * seconds,
        "error": abs(predicted.makespan / seconds - 1),
        "predicted_bubbles": average_bubbles(predicted).fraction,
        "measured_bubbles": average_bubbles(real).fraction,
        "longest_action_ms": 1e3 * max(max(cost.forward, cost.backward) for cost in costs.stages.values()),
        "overhead_ms": 1e3 * costs.action_overhead,
        "busy_slowdown": slowdown[-1],
    }
    if profiled is not None:
        analytic = recipe_step_model(recipe, graph, adapters, profile=profiled).costs(plan, schedule)
        makespan = simulate(schedule, apart(with_links(analytic, measured, plan, schedule), slowdown)).makespan
        entry |= {"profile_ms": 1e3 * makespan, "profile_error": abs(makespan / seconds - 1)}
    return entry, (predicted, real)


def _median_step(schedule: Schedule, measured: list[Measured]) -> tuple[Timeline, float]:
    """The step of median length."""
    steps = []
    for ranks in zip(*(each.steps for each in measured), strict=True):
        zero = min(recording[0][1] for recording, _ in ranks)
        steps.append((max(end for _, end in ranks) - zero, zero, ranks))
    seconds = statistics.median_low(length for length, _, _ in steps)
    zero, ranks = next((zero, ranks) for length, zero, ranks in steps if length == seconds)
    records = {
        rank: [(action, start - zero, stop - zero) for action, start, stop in recording]
        for rank, (recording, _) in enumerate(ranks)
    }
    return Timeline.recorded(schedule, records), seconds


def table(result: dict[str, Any]) -> str:
    """A line per configuration."""
    lines = [f"{'configuration':18} {'predicted':>11} {'measured':>11} {'error':>7} {'bubbles':>15}"]
    lines += [
        f"{r['name']:18} {r['predicted_ms']:9.1f}ms {r['measured_ms']:9.1f}ms {r['error']:7.1%} "
        f"{r['predicted_bubbles']:7.1%}{r['measured_bubbles']:8.1%}"
        + (f"   by profile {r['profile_ms']:9.1f}ms {r['profile_error']:7.1%}" if "profile_ms" in r else "")
        for r in result["configurations"]
    ]
    return "\n".join([*lines, f"worst error: {result['max_prediction_error']:.1%}"])
