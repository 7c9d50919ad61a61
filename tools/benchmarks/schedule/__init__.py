"""Predicted against measured makespan and bubbles of training steps on two pinned ranks, costs fitted at other shapes.

Configurations of one small VLM, packed and context-parallel ones among them, each rank on a core of its own with one
thread. Every rank times its stages by themselves at other microbatch sizes, both ranks at the same time, through the
code that the runtime uses; each part of each stage becomes a quadratic of its tokens, and the simulator runs the step's
schedule with these seconds, less what busy cores slow each other down (`benchmarks.busy`): where only one of them
works, it is faster. Ranks that share tokens run their stage together, fetches included, and take what the one with
most rows and pairs takes. Measuring and running take turns, because a machine's speed drifts, and medians are kept. A
makespan is from the first action to the last on any rank; the optimizer is not part of it.

Bubbles are the share of the step in which a rank computes no layer, on average over ranks: waits, sums of gradients,
and what the runtime itself takes around actions (sends, transfers that are worked out, Python), which is measured in
steps of another shape as seconds per action. `measured_bubbles` and, with the predicted ones, `bubbles_by_class` are
those of the step of median length; `median_bubbles` is the median over all steps (`bubbles_of_steps`), which scatters
less than one step does, and `bubble_error` what the prediction is above it.

The trivial predictor knows no order: a step takes what its busiest rank has to do (`busiest_rank_error`), and the other
ranks' bubbles are the rest of it (`busiest_rank_bubble_error`).

`quiet` says whether the machine did little enough else for errors to be judged: plain code that runs in turns with all
this had its core for all but `background_load` of the time (at most 5%), and half of its turns lie within `noise` (at
most 10%); both are those of the worst configuration. Where it is false, run again; no error then says anything.

With `--profile-seconds`, what `hetmesh profile` fits, layer by layer, makes a second prediction (`profile_error`).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from analysis.lower_bounds import busiest_rank
from benchmarks.busy import Quiet, Sizes, apart, busy_slowdown
from benchmarks.schedule.predict import step_costs, with_links
from benchmarks.schedule.recipes import CONFIGURATIONS, Configuration
from benchmarks.schedule.stages import Measured, measure, profile
from hetmesh.balance import plan_batch
from hetmesh.cost import Profile
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.schedule import Schedule
from hetmesh.simulate import CLASSES, Bubbles, Timeline, average_bubbles, simulate
from hetmesh.testing.pool import WorkerPool

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
    results, profiled = [], None
    with WorkerPool(2) as pool:
        if args.profile_seconds:
            recipe = CONFIGURATIONS[0].recipe(microbatch=2 * args.microbatch, **sizes)  # which holds out half of it
            profiled = pool.run(profile, recipe, args.profile_seconds, timeout=600)[0]
        for configuration in chosen:
            recipe = configuration.recipe(microbatch=args.microbatch, **sizes)
            options = (args.fit, args.rounds, args.seconds, args.steps, busy)
            measured = pool.run(measure, recipe, *options, timeout=900)
            results.append(_compare(configuration, recipe, measured, profiled))
    load, noise = (max(r[key] for r in results) for key in ("background_load", "noise"))
    return {
        "max_prediction_error": max(r["error"] for r in results),
        "max_bubble_error": max(abs(r["bubble_error"]) for r in results),
        "max_busiest_rank_error": max(r["busiest_rank_error"] for r in results),
        "max_busiest_rank_bubble_error": max(abs(r["busiest_rank_bubble_error"]) for r in results),
        "quiet": bool(Quiet(load, noise)),
        "background_load": load,
        "noise": noise,
        "configurations": results,
    }


def _compare(
    configuration: Configuration, recipe: Recipe, measured: list[Measured], profiled: Profile | None
) -> dict[str, Any]:
    resolved = resolve(recipe)
    graph = resolved.graph
    loader = Loader(resolved.source, recipe.batch.global_batch_size, resolved.expander, seed=recipe.debug.seed)
    plan = plan_batch(graph, [d.meta for d in loader.batch(0)], recipe.batch.microbatch_size)
    schedule = recipe_schedule(recipe, graph, plan.routes)
    slowdown = busy_slowdown(each.busy for each in measured)
    costs = apart(step_costs(measured, plan, schedule), slowdown)
    predicted, steps = simulate(schedule, costs), _steps(schedule, measured)
    real, seconds = sorted(steps, key=lambda step: step[1])[(len(steps) - 1) // 2]  # the lower median
    ideal, found = average_bubbles(predicted), average_bubbles(real)
    shares = [average_bubbles(step).fraction for step, _ in steps]
    usual, busiest = statistics.median(shares), busiest_rank(schedule, costs)
    quiet = Quiet.of([s for each in measured for s in each.busy], [k for each in measured for k in each.kept_off])
    entry = {
        "name": configuration.name,
        "predicted_ms": 1e3 * predicted.makespan,
        "measured_ms": 1e3 * seconds,
        "error": abs(predicted.makespan / seconds - 1),
        "predicted_bubbles": ideal.fraction,
        "measured_bubbles": found.fraction,
        "median_bubbles": usual,
        "bubble_error": ideal.fraction - usual,
        "busiest_rank_error": abs(busiest / seconds - 1),
        "busiest_rank_bubble_error": 1 - ideal.compute / busiest - usual,
        "bubbles_by_class": {name: [_share(ideal, name), _share(found, name)] for name in CLASSES},
        "bubbles_of_steps": shares,
        "longest_action_ms": 1e3 * max(max(cost.forward, cost.backward) for cost in costs.stages.values()),
        "overhead_ms": 1e3 * costs.action_overhead,
        "busy_slowdown": slowdown[-1],
        "background_load": quiet.load,
        "noise": quiet.noise,
    }
    if profiled is not None:
        analytic = recipe_step_model(recipe, graph, resolved.shapes, profile=profiled).costs(plan, schedule)
        makespan = simulate(schedule, apart(with_links(analytic, measured, plan, schedule), slowdown)).makespan
        entry |= {"profile_ms": 1e3 * makespan, "profile_error": abs(makespan / seconds - 1)}
    return entry


def _share(bubbles: Bubbles, name: str) -> float:
    return getattr(bubbles, name) / (bubbles.compute + bubbles.idle)


def _steps(schedule: Schedule, measured: list[Measured]) -> list[tuple[Timeline, float]]:
    """What ran, and its seconds, per step."""
    steps = []
    for ranks in zip(*(each.steps for each in measured), strict=True):
        zero = min(recording[0][1] for recording, _ in ranks)
        records = {
            rank: [(action, start - zero, stop - zero) for action, start, stop in recording]
            for rank, (recording, _) in enumerate(ranks)
        }
        steps.append((Timeline.recorded(schedule, records), max(end for _, end in ranks) - zero))
    return steps


def table(result: dict[str, Any]) -> str:
    """A line per configuration."""
    lines = [f"{'configuration':18} {'predicted':>11} {'measured':>11} {'error':>7} {'bubbles':>15}"]
    lines += [
        f"{r['name']:18} {r['predicted_ms']:9.1f}ms {r['measured_ms']:9.1f}ms {r['error']:7.1%} "
        f"{r['predicted_bubbles']:7.1%}{r['median_bubbles']:8.1%}"
        + (f"   by profile {r['profile_ms']:9.1f}ms {r['profile_error']:7.1%}" if "profile_ms" in r else "")
        for r in result["configurations"]
    ]
    quiet = "quiet enough to judge" if result["quiet"] else "NOT quiet enough to judge: run it again"
    return "\n".join(
        [
            *lines,
            f"worst error: {result['max_prediction_error']:.1%} of a step, "
            f"{100 * result['max_bubble_error']:.1f} points of bubbles",
            f"by the busiest rank alone: {result['max_busiest_rank_error']:.1%} and "
            f"{100 * result['max_busiest_rank_bubble_error']:.1f} points",
            f"{quiet} (background load {result['background_load']:.1%}, noise {result['noise']:.1%})",
        ]
    )
