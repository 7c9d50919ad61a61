"""Twelve plans of one batch on two pinned ranks: predicted against measured step times and memory, and their order.

Every plan runs in real processes, each rank on a core of its own with one thread: forwards, backwards, transfers, sums
of gradients, clipping and the optimizer. Its prediction is a simulation of the same batch plan and schedule with costs
of this machine, of other samples: each stage by itself at other microbatch sizes (together where its ranks share
layers), messages, sums and the optimizer by themselves, and what two busy cores slow each other down
(`benchmarks.busy`). Rounds go over all plans, so that measuring and running take turns; medians are kept.

Memory is predicted from sizes alone, as `hetmesh explain` does, and counted operation by operation (`LiveBytes`); the
rank of which the prediction is further off counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.busy import Sizes, apart, busy_slowdown
from benchmarks.plans.layouts import PLANS, Plan
from benchmarks.plans.steps import PlanSteps, measure
from benchmarks.schedule.predict import step_costs
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.predictions import step_memory
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.simulate import simulate
from hetmesh.testing.pool import WorkerPool

JUDGES = (
    "src/hetmesh/balance",
    "src/hetmesh/cost",
    "src/hetmesh/schedule",
    "src/hetmesh/simulate",
    "src/hetmesh/runtime",
)
"""What an output of it judges (`kept.py`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(PLANS))), help="numbers of plans")
    parser.add_argument("--width", type=int, default=192, help="of the LLM and the encoder (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the LLM, at least 4 (default %(default)s)")
    parser.add_argument("--samples", type=int, default=16, help="per step (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=24, help="turns of measuring and running (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of measuring a plan per round (default %(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and predict all plans."""
    busy = Sizes(args.width, args.width * 11 // 4, layers=args.layers)
    plans = [PLANS[i] for i in args.only]
    recipes = [plan.recipe(width=args.width, layers=args.layers, samples=args.samples) for plan in plans]
    with WorkerPool(2) as pool:
        options = ([plan.fitted for plan in plans], args.rounds, args.seconds, busy)
        ranks = pool.run(measure, recipes, *options, timeout=600)
    slowdown = busy_slowdown(([undisturbed(alone)], [undisturbed(together)]) for _, (alone, together) in ranks)
    rows = [
        _row(plan, recipe, [found[i] for found, _ in ranks], slowdown)
        for i, (plan, recipe) in enumerate(zip(plans, recipes, strict=True))
    ]
    errors = [row["error"] for row in rows]
    predicted, measured = ([row[key] for row in rows] for key in ("predicted_ms", "measured_ms"))
    return {
        "rank_correlation": _rank_correlation(predicted, measured),
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "worst_memory_error": max(row["memory_error"] for row in rows),
        "predicted_span": max(predicted) / min(predicted),
        "busy_slowdown": slowdown[-1],
        "rows": rows,
    }


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: two cores that do nothing else slow each other down by less than other processes do."""
    return float(np.quantile(seconds, 0.25))


def _row(plan: Plan, recipe: Recipe, ranks: Sequence[PlanSteps], slowdown: tuple[float, ...]) -> dict[str, Any]:
    predicted = predict(recipe, ranks, slowdown)
    seconds = statistics.median(max(each) for each in zip(*(rank.seconds for rank in ranks), strict=True))
    held = predicted_bytes(recipe)
    return {
        "name": plan.name,
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * seconds,
        "error": abs(predicted / seconds - 1),
        "memory_error": max(abs(held[rank] / each.peak_bytes - 1) for rank, each in enumerate(ranks)),
        "predicted_bytes": [held[rank] for rank in range(len(ranks))],
        "measured_bytes": [each.peak_bytes for each in ranks],
        "optimizer_ms": 1e3 * max(statistics.median(each.optimizer) for each in ranks),
        "steps_ms": [round(1e3 * max(each), 1) for each in zip(*(rank.seconds for rank in ranks), strict=True)],
    }


def predicted_bytes(recipe: Recipe) -> dict[int, int]:
    """The most bytes of tensors on each rank in the step over the first global batch."""
    resolved = resolve(recipe)
    plan = resolved.plan(resolved.loader().batch(0).metas)
    model = resolved.step_model("h100")
    return {rank: memory.tensors for rank, memory in step_memory(resolved, model, plan).items()}


def predict(recipe: Recipe, ranks: Sequence[PlanSteps], slowdown: tuple[float, ...]) -> float:
    """Seconds of the step over the first global batch."""
    resolved = resolve(recipe)
    drawn = resolved.loader().batch(0)
    plan = resolved.plan(drawn.metas)
    schedule = recipe_schedule(recipe, resolved.graph, plan.routes)
    costs = apart(step_costs([each.measured for each in ranks], plan, schedule), slowdown)
    optimizer = {rank: statistics.median(each.optimizer) / slowdown[-1] for rank, each in enumerate(ranks)}
    return simulate(schedule, replace(costs, optimizer=optimizer)).makespan


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    if len(a) < 2:
        return float("nan")
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def table(result: dict[str, Any]) -> str:
    """A line per plan."""
    lines = [
        f"{'plan':30} {'predicted':>11} {'measured':>11} {'error':>7} {'optimizer':>11} {'memory':>9} {'error':>7}"
    ]
    lines += [
        f"{r['name']:30} {r['predicted_ms']:9.1f}ms {r['measured_ms']:9.1f}ms {r['error']:7.1%} "
        f"{r['optimizer_ms']:9.1f}ms {max(r['measured_bytes']) / 1e6:7.1f}MB {r['memory_error']:7.1%}"
        for r in result["rows"]
    ]
    keys = ("rank_correlation", "mean_error", "worst_error", "worst_memory_error", "predicted_span", "busy_slowdown")
    return "\n".join([*lines, ", ".join(f"{key} {result[key]:.3f}" for key in keys)])
