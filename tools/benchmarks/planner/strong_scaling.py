"""What `hetmesh plan` finds for ViT-22B + GPT-175B on 1,536, 2,048 and 3,072 GPUs, beside the best that is at hand.

At hand are `recipes/mllm_22b_175b.toml`, written by hand, with its degrees at that number of ranks, and the encoder
plans that `bench.py optimus` found without kernels in collectives, laid out on the recipe's model; both as they are and
with optimizer state over the replicas (ZeRO-1), without which they do not fit into 72 GB. All are simulated alike.

The baseline is the best homogeneous layout that the planner finds where everything is recomputed, as in the published
runs, on an H100 with the constants of `benchmarks/optimus/models.py`. These were calibrated on the three published
seconds that it is compared with, by another layout of another model of the same sizes. `baseline_free` may keep
activations; `baseline_h100` is on the machine file as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.optimus import models
from hetmesh.errors import HetmeshError
from hetmesh.planner import LayoutPlan, ModulePlan, Predictor, Problem, search
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.planning import recipe_problem
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.schedule import PolicyOptions

RECIPE = Path(__file__).parents[3] / "recipes" / "mllm_22b_175b.toml"
RECOMPUTED = {"vision.activation_checkpoint": "full", "llm.activation_checkpoint": "full"}


def strong_scaling() -> dict[str, dict[str, Any]]:
    """By number of GPUs."""
    return {str(gpus): _cell(gpus, published["balanced_s"]) for gpus, published in models.PUBLISHED.items()}


def problem(gpus: int, fixed: dict[str, Any] | None = None) -> Problem:
    """The recipe's model, batch and data on an H100 as the machine file has it."""
    return recipe_problem(resolve(load_recipe(RECIPE)), machine="h100", ranks=gpus, fixed=fixed)


def at_hand(given: Problem) -> dict[str, float]:
    """Seconds of the layouts that others found."""
    found = {}
    lanes = given.ranks // (models.PP * models.TP)
    for name, (replicas, shards) in {"replicas": (lanes, 1), "ZeRO-1": (1, lanes)}.items():
        keys = [f"--parallelism.{module}.ranks=0-{given.ranks - 1}" for module in ("vision", "llm")]
        for axis, size in (("replicate", replicas), ("shard", shards)):
            keys += [f"--parallelism.{module}.data_parallel_{axis}_degree={size}" for module in ("vision", "llm")]
        found[f"recipe, {name}"] = simulate_recipe(resolve(load_recipe(RECIPE, keys)), machine="h100").makespan
    predictor = Predictor(given, 1, 1)
    for name, plan in _encoder_plans(given.ranks):
        try:
            found[name] = predictor.predict(plan).step_s
        except HetmeshError as error:
            raise AssertionError(f"{name}: {error}") from error
    return found


def _encoder_plans(gpus: int) -> Iterator[tuple[str, LayoutPlan]]:
    """Pipelines of 8 stages in 2 or 3 turns with half of the LLM's TP: what `bench.py optimus` found."""
    lanes = gpus // (models.PP * models.TP)
    options = PolicyOptions(inner="interleaved", early=True)
    for turns in (2, 3):
        for name, shared in (("replicas", False), ("ZeRO-1", True)):

            def own(count: int, tp: int, stages: int, shared: bool = shared) -> ModulePlan:
                degrees = (models.PP, 1, count, 1, tp) if shared else (models.PP, count, 1, 1, tp)
                plan = ModulePlan((0, gpus), degrees, "full", sequence_parallel=True)
                return replace(plan, stages_per_rank=stages)

            layout = {"vision": own(2 * lanes, models.TP // 2, turns), "llm": own(lanes, models.TP, models.VIRTUAL)}
            yield (
                f"encoder plan in {turns} turns, {name}",
                LayoutPlan("colocated", layout, "bubble_fill", models.MICROBATCH, options),
            )


def _cell(gpus: int, published: float) -> dict[str, Any]:
    given, rivals = problem(gpus), at_hand(problem(gpus))
    began = time.process_time()
    found = search(given, shown=1)
    searched = time.process_time() - began
    assert found.fastest is not None
    baselines = {"baseline_h100": best_homogeneous(given), "baseline_free": best_homogeneous(_calibrated(given))}
    baseline = best_homogeneous(_calibrated(problem(gpus, RECOMPUTED)))
    return {
        "planned": str(found.fastest.plan),
        "planned_s": found.fastest.step_s,
        "planned_gb": found.fastest.peak_bytes / 1e9,
        "search_s": searched,
        "best_by_placement": {name: best[0].step_s for name, best in found.best.items() if best},
        "at_hand_s": rivals,
        "planned_over_best": found.fastest.step_s / min(rivals.values()),
        "baseline_s": baseline[1],
        "baseline": baseline[0],
        "published_s": published,
        "baseline_over_published": baseline[1] / published,
        **{name: {"layout": layout, "step_s": seconds} for name, (layout, seconds) in baselines.items()},
    }


def _calibrated(given: Problem) -> Problem:
    return replace(given, machine=models.machine(models.CALIBRATION))


def best_homogeneous(given: Problem) -> tuple[str, float]:
    """The layout and its seconds."""
    best = search(replace(given, fixed={**given.fixed, ("", "placement"): "homogeneous"}), shown=1).fastest
    assert best is not None
    return str(best.plan), best.step_s


def scaling_lines(result: dict[str, dict[str, Any]]) -> list[str]:
    """The cells as lines."""
    lines = []
    for gpus, cell in result.items():
        rivals = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cell["at_hand_s"].items())
        lines += [
            f"mllm_22b_175b on {gpus} GPUs: planned {cell['planned_s']:.2f} s, {cell['planned_over_best']:.2f} of the "
            f"best at hand ({rivals}); {cell['planned_gb']:.0f} GB; search {cell['search_s']:.0f} s; {cell['planned']}",
            f"  homogeneous {cell['baseline_s']:.2f} s, {cell['baseline_over_published']:.2f} of the published "
            f"{cell['published_s']:.2f} on whose seconds the constants were calibrated; without recomputation where it "
            f"fits {cell['baseline_free']['step_s']:.2f}; h100 as it is {cell['baseline_h100']['step_s']:.2f}",
        ]
    return lines
