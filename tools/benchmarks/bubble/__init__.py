"""bubble_fill over three_phase in real processes: few microbatches, two pinned ranks, measured and predicted.

One small VLM, its encoder data parallel on the two ranks that hold the LLM's two stages: `three_phase` runs all
forwards of the encoder before the LLM's pipeline and all backwards behind it, `bubble_fill` runs slices of it in the
gaps. Steps of both take turns, on the same samples. `speedup_measured` is the median over rounds of the one makespan
over the other, from the first action to the last on any rank. `speedup_predicted` is that of the simulator, with
seconds of stages that were measured between the steps, by themselves and of other samples, and with what two busy cores
slow each other down (`benchmarks.busy`): filling a gap makes both busy, so part of what it gains goes there
(`speedup_alone`: without).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.bubble.measure import Turns, measure
from benchmarks.busy import Sizes, apart, busy_slowdown
from benchmarks.schedule.predict import step_costs
from benchmarks.schedule.recipes import SPREAD_PIPELINE, Configuration
from hetmesh.balance import plan_batch
from hetmesh.cost import Lanes
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import average_bubbles, simulate
from hetmesh.simulate.lanes import group_ranks, plan_flows
from hetmesh.testing.pool import WorkerPool

JUDGES = ("src/hetmesh/schedule", "src/hetmesh/simulate", "src/hetmesh/runtime")
"""What an output of it judges (`kept.py`)."""

POLICIES = ("three_phase", "bubble_fill")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--width", type=int, default=256, help="of the LLM and the encoder (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the LLM (default %(default)s)")
    parser.add_argument("--vision-layers", type=int, default=5, help="of the encoder (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help="per step (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=4, help="samples per microbatch (default %(default)s)")
    parser.add_argument("--fit", type=int, nargs="+", default=[2, 6], help="samples per microbatch that are fitted")
    parser.add_argument("--rounds", type=int, default=10, help="of a step of each and measuring (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement between steps")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and predict both."""
    if args.microbatch in args.fit:
        raise SystemExit(f"--fit {args.fit} must not hold what is run, --microbatch {args.microbatch}")
    recipes = [_recipe(policy, args) for policy in POLICIES]
    busy = Sizes(args.width, args.width * 11 // 4, layers=args.layers, samples=args.microbatch)
    with WorkerPool(2) as pool:
        ranks = pool.run(measure, recipes, args.fit, args.rounds, args.seconds, busy, timeout=900)
    slowdown = busy_slowdown(turns.busy for turns in ranks)
    real = [_makespans(ranks, i) for i in range(len(recipes))]
    out: dict[str, Any] = {}
    for i, (policy, recipe) in enumerate(zip(POLICIES, recipes, strict=True)):
        timelines = _predicted(recipe, ranks, i, slowdown)
        out[policy] = {
            "measured_ms": 1e3 * statistics.median(real[i]),
            "predicted_ms": 1e3 * timelines[0].makespan,
            "predicted_alone_ms": 1e3 * timelines[1].makespan,
            "predicted_bubbles": average_bubbles(timelines[0]).fraction,
        }
    before, after = (out[policy] for policy in POLICIES)
    ratios = [a / b for a, b in zip(*real, strict=True)]
    return {
        "speedup_measured": statistics.median(ratios),
        "speedup_predicted": before["predicted_ms"] / after["predicted_ms"],
        "speedup_alone": before["predicted_alone_ms"] / after["predicted_alone_ms"],
        "busy_slowdown": slowdown[-1],
        **out,
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{key: getattr(args, key) for key in ("width", "layers", "vision_layers", "microbatches", "microbatch")},
    }


def _recipe(policy: str, args: argparse.Namespace) -> Recipe:
    keys = "bubble_fill_layers_per_slice = 1\n" if policy == "bubble_fill" else ""
    configuration = Configuration(policy, policy, keys + SPREAD_PIPELINE)
    sizes = {"width": args.width, "llm_layers": args.layers, "vision_layers": args.vision_layers}
    return configuration.recipe(microbatch=args.microbatch, microbatches=args.microbatches, **sizes)


def _makespans(ranks: Sequence[Turns], i: int) -> list[float]:
    """Seconds of each step of a recipe, from the first action on any rank to the last."""
    steps = zip(*(turns.measured[i].steps for turns in ranks), strict=True)
    return [max(end for _, end in both) - min(recording[0][1] for recording, _ in both) for both in steps]


def _predicted(recipe: Recipe, ranks: Sequence[Turns], i: int, slowdown: tuple[float, ...]) -> list[Any]:
    """The simulated step, beside each other's slowdown and without."""
    resolved = resolve(recipe)
    graph = resolved.graph
    prepare = resolved.expander
    loader = Loader(resolved.source, recipe.batch.global_batch_size, prepare, seed=recipe.debug.seed)
    plan = plan_batch(graph, loader.batch(0).metas, recipe.batch.microbatch_size)
    schedule = resolved.schedules.of(plan)
    groups = {stage: group_ranks(graph[stage.module], stage.index) for stage in schedule.stages.stages}
    lanes = Lanes(groups, plan_flows(plan, schedule))
    costs = step_costs([turns.measured[i] for turns in ranks], plan, schedule)
    costs = replace(apart(costs, slowdown), lanes=lanes)
    return [simulate(schedule, each) for each in (costs, replace(costs, busy_slowdown=()))]


def table(result: dict[str, Any]) -> str:
    """A line per policy."""
    lines = [f"{'schedule':14} {'measured':>11} {'predicted':>11} {'no slowdown':>12} {'bubbles':>8}"]
    lines += [
        f"{policy:14} {each['measured_ms']:9.1f}ms {each['predicted_ms']:9.1f}ms {each['predicted_alone_ms']:10.1f}ms "
        f"{each['predicted_bubbles']:8.1%}"
        for policy, each in ((policy, result[policy]) for policy in POLICIES)
    ]
    speedups = (result[f"speedup_{key}"] for key in ("measured", "predicted", "alone"))
    lines.append(f"{'speed-up':14} {next(speedups):11.3f} {next(speedups):11.3f} {next(speedups):12.3f}")
    return "\n".join([*lines, f"two busy cores are {result['busy_slowdown']:.3f} times as slow"])
