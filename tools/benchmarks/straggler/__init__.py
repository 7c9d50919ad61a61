"""Stragglers in real processes: step time without and with balancing, measured and predicted, on two pinned ranks.

An encoder on one core feeds an LLM on the other; lengths are those of charts (`benchmarks.balance.laws`), divided by as
much as the towers are narrower. Trainers take turns on the same global batches, all else equal: `none` has the recipe's
number of microbatches, `auto` a free one. `measured_ratio` is the median over batches of the step of `none` over that
of `auto`. `predicted_ratio` is that of the same batches by the simulator, with seconds of stages that were measured
between the steps, by themselves and of other samples, and with what two busy cores slow each other down
(`benchmarks.busy`). `planning_share`: what the training thread spends to get the upcoming step (drawn, balanced,
planned and scheduled) over the step time, of `auto`. `..._fixed` are those keys of `auto` in the recipe's number of
microbatches: with one sample each, it can do little but order them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.balance.laws import CHARTS
from benchmarks.busy import Sizes, apart, busy_slowdown
from benchmarks.schedule.predict import step_costs
from benchmarks.schedule.stages import Measured
from benchmarks.straggler.measure import Steps, measure
from benchmarks.straggler.regret import auto_regret
from benchmarks.straggler.source import recipe
from hetmesh.balance import plan_batch
from hetmesh.data.loader import Loader
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.simulate import simulate
from hetmesh.testing.pool import WorkerPool

JUDGES = ("src/hetmesh/balance", "src/hetmesh/simulate", "src/hetmesh/runtime", "src/hetmesh/training/upcoming.py")
"""What an output of it judges (`kept.py`)."""

RECIPES = (("none", "recipe"), ("auto", "free"), ("auto", "recipe"))
"""`[balance] policy` and `microbatches`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--law", default=CHARTS[1], choices=CHARTS, help="of lengths (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=192, help="of the encoder, half of the LLM's (default %(default)s)"
    )
    parser.add_argument("--vision-layers", type=int, default=3, help="of the encoder (default %(default)s)")
    parser.add_argument("--llm-layers", type=int, default=2, help="of the LLM (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=24, help="per step (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=1, help="samples per microbatch (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="batches that are compared (default %(default)s)")
    parser.add_argument("--regret-batches", type=int, default=6, help="batches of auto's regret (default %(default)s)")
    parser.add_argument("--regret-repetitions", type=int, default=6, help="of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement between steps")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, measure, predict."""
    sizes = {k: getattr(args, k) for k in ("law", "width", "vision_layers", "llm_layers", "microbatch", "microbatches")}
    recipes = [recipe(*balance, smaller=1152 / args.width, **sizes) for balance in RECIPES]
    busy = Sizes(args.width, args.width * 4, layers=args.vision_layers, samples=1, tokens=192)
    with WorkerPool(2) as pool:
        ranks = pool.run(measure, recipes, args.rounds, args.seconds, busy, timeout=900)
        several = sizes | {"microbatch": 4 * args.microbatch, "microbatches": max(args.microbatches // 3, 1)}
        judged = recipe("auto", "recipe", smaller=1152 / args.width, **several)
        regret = auto_regret(judged, pool, args.regret_batches, args.regret_repetitions, 20 * args.seconds)
    measured = [probe for _, probe in ranks]
    slowdown = busy_slowdown(probe.busy for probe in measured)
    none, *balanced = (_slower([steps[i] for steps, _ in ranks]) for i in range(len(recipes)))
    before, *after = (predicted(each, none.batches, measured, slowdown) for each in recipes)
    out: dict[str, Any] = {}
    details: dict[str, Any] = {
        "busy_slowdown": slowdown[-1],
        "none_ms": _ms(none.seconds),
        "predicted_none_ms": _ms(before),
    }
    for suffix, steps, guess in zip(("", "_fixed"), balanced, after, strict=True):
        ratios, expected = _ratios(none.seconds, steps.seconds), _ratios(before, guess)
        out |= {
            f"measured_ratio{suffix}": statistics.median(ratios),
            f"predicted_ratio{suffix}": statistics.median(expected),
            f"planning_share{suffix}": statistics.mean(steps.planning) / statistics.mean(steps.seconds),
        }
        details |= {
            f"auto{suffix}_ms": _ms(steps.seconds),
            f"predicted_auto{suffix}_ms": _ms(guess),
            f"planning{suffix}_ms": _ms(steps.planning),
            f"ratios{suffix}": [round(ratio, 3) for ratio in ratios],
            f"predicted_ratios{suffix}": [round(ratio, 3) for ratio in expected],
        }
    return out | regret | details | sizes


def _ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _ratios(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(before, after, strict=True)]


def _slower(ranks: Sequence[Steps]) -> Steps:
    """Of each step the slower rank counts."""
    seconds = [max(each) for each in zip(*(rank.seconds for rank in ranks), strict=True)]
    planning = [max(each) for each in zip(*(rank.planning for rank in ranks), strict=True)]
    return Steps(ranks[0].batches, seconds, planning)


def predicted(
    recipe: Recipe, batches: Sequence[int], measured: Sequence[Measured], slowdown: tuple[float, ...]
) -> list[float]:
    """Seconds of the steps of some global batches."""
    resolved = resolve(recipe)
    graph = resolved.graph
    prepare = resolved.expander
    loader = Loader(resolved.source, recipe.batch.global_batch_size, prepare, seed=recipe.debug.seed)
    balance = resolved.balance
    seconds = []
    for batch in batches:
        plan = plan_batch(graph, loader.batch(batch).metas, recipe.batch.microbatch_size, balance)
        schedule = recipe_schedule(recipe, graph, plan.routes)
        costs = apart(step_costs(measured, plan, schedule), slowdown)
        seconds.append(simulate(schedule, costs).makespan)
    return seconds


def table(result: dict[str, Any]) -> str:
    """The keys for people."""
    lines = [f"{'step':16}{'measured':>10}{'ratio':>7}{'predicted':>11}{'ratio':>7}{'planning':>10}"]
    lines.append(f"{'none':16}{result['none_ms']:8.0f}ms{'':7}{result['predicted_none_ms']:9.0f}ms")
    for name, suffix in (("auto", ""), ("auto, fixed", "_fixed")):
        seconds = (result[f"auto{suffix}_ms"], result[f"predicted_auto{suffix}_ms"])
        ratios = (result[f"measured_ratio{suffix}"], result[f"predicted_ratio{suffix}"])
        columns = f"{seconds[0]:8.0f}ms{ratios[0]:7.3f}{seconds[1]:9.0f}ms{ratios[1]:7.3f}"
        lines.append(f"{name:16}{columns}{result[f'planning_share{suffix}']:10.2%}")
    regret, scatter = result["auto_regret_measured"], result["auto_regret_scatter"]
    lines.append(f"auto's step is {regret:+.2%} (standard error {scatter:.2%}) of the best single balancer's")
    return "\n".join([*lines, f"two busy cores are {result['busy_slowdown']:.3f} times as slow"])
