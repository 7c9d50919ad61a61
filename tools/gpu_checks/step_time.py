"""What hetmesh costs: step time and MFU of its trainer beside a plain PyTorch loop on the same modules and samples.

The plain loop does one forward, one backward, fused AdamW and torch.autocast; both take turns in one process. The large
case is SigLIP-so400m and Qwen3-0.6B on synthetic samples, without activation checkpointing.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

import hetmesh
from benchmarks.overhead import PlainLoop
from gpu_checks.found import Found, Place
from gpu_checks.sizes import EQUAL, LARGE, ONE_RANK, RECIPES, sized
from hetmesh.cost import Work, module_flops
from hetmesh.dryrun.dry_run import dry_run
from hetmesh.recipe.recipe import Recipe, load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer

WARM_UP = 3
LOOPS = ("hetmesh", "plain")
LARGE_CASE = "SigLIP-so400m + Qwen3-0.6B in bf16"
RATIO = 1.1
"""Of the large case; 1.06 on an H100 (torch 2.11). Digits are so small that the host's time counts: they are shown."""
FLOPS = 0.05
"""Relative difference of FLOPs by formula and by operation."""
AGREE = 1e-4
"""Difference of the losses of the first step."""


def run(place: Place) -> Found:
    """All cases that the device is large enough for."""
    if place.device == "fake":
        return flops()
    cases = []
    for name, recipe in _recipes(place).items():
        cases.append(measure(name, recipe, place))
        text = "{name}: {hetmesh_ms:.1f} ms/step, plain loop {plain_ms:.1f} ms/step, ratio {step_time_ratio:.3f}"
        print(text.format(**cases[-1]), flush=True)
    figures: dict[str, Any] = {"cases": cases, "loss_difference": max(case["loss_difference"] for case in cases)}
    if not place.on_gpu:
        return Found(figures, {"loss_difference": AGREE}, {LARGE_CASE: "too large for a CPU"})
    figures["large_step_time_ratio"] = cases[-1]["step_time_ratio"]
    return Found(figures, {"loss_difference": AGREE, "large_step_time_ratio": RATIO})


def flops() -> Found:
    """FLOPs of the large case as MFU counts them, beside those of the operations of a dry run."""
    recipe = sized({**LARGE, **EQUAL}, ONE_RANK)
    resolved = resolve(recipe)
    graph = resolved.graph
    drawn = resolved.loader().batch(0)
    plan = resolved.plan(drawn.metas)
    shapes, counted = resolved.shapes, dry_run(resolved).work
    modules = {}
    for name in graph.order:
        shape = shapes[name]
        assert shape is not None
        upstream = any(graph.needs_gradient(b) for b in graph.inputs(name))
        formula = module_flops(shape, Work.sum_of(plan.lane_work(name)), upstream=upstream).total
        modules[name] = {"formula": formula, "operations": counted[name].flops}
        told = "{0}: {formula:.4g} FLOPs by formula, {operations:.4g} by operation"
        print(told.format(name, **modules[name]), flush=True)
    ours, run = (sum(each[key] for each in modules.values()) for key in ("formula", "operations"))
    figures = {"modules": modules, "flops_error": abs(ours / run - 1)}
    return Found(figures, {"flops_error": FLOPS}, {"times": "a fake accelerator takes none"})


def _recipes(place: Place) -> Mapping[str, Recipe]:
    endless, bf16 = "--training.steps=100000", "--training.mixed_precision_param=bfloat16"
    digits = {
        "digits": load_recipe(RECIPES / "digits_single.toml", [endless]),
        "digits in bf16": load_recipe(RECIPES / "digits_single.toml", [endless, bf16]),
    }
    return {**digits, LARGE_CASE: sized(LARGE, ONE_RANK)} if place.on_gpu else digits


def measure(name: str, recipe: Recipe, place: Place) -> dict[str, Any]:
    """Step time and MFU of both loops on the same samples."""
    with tempfile.TemporaryDirectory() as folder:
        job = recipe.job.model_copy(update={"dump_folder": folder})
        world = hetmesh.init(device="cuda" if place.on_gpu else "cpu")
        trainer = Trainer(resolve(recipe.model_copy(update={"job": job})), world)
        plain = PlainLoop(recipe, 0, 1, device=world.device)
        seconds: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        mfu, difference = [], 0.0
        try:
            for step in range(WARM_UP + place.steps):
                losses = {}
                for loop in (
                    LOOPS if step % 2 else LOOPS[::-1]
                ):  # who comes first pays for what kernels prepare per shape
                    world.accelerator.synchronize()
                    started = time.perf_counter()
                    if loop == "hetmesh":
                        metrics = trainer.train_step()
                        losses[loop] = metrics.loss
                    else:
                        losses[loop] = plain.step()
                    world.accelerator.synchronize()
                    if step >= WARM_UP:
                        seconds[loop].append(time.perf_counter() - started)
                if step == 0:
                    difference = abs(losses["hetmesh"] - losses["plain"])
                if step >= WARM_UP:
                    mfu.append(metrics.cost.mfu)
        finally:
            trainer.upcoming.close()
            trainer.reporter.close()
            world.close()
    del trainer, plain
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()
    ours, theirs = (statistics.median(seconds[loop]) for loop in LOOPS)
    known = statistics.median(mfu) if all(m is not None for m in mfu) else None
    return {
        "name": name,
        "hetmesh_ms": 1e3 * ours,
        "plain_ms": 1e3 * theirs,
        "step_time_ratio": ours / theirs,
        "hetmesh_mfu": known,
        "plain_mfu": None if known is None else known * ours / theirs,  # the same FLOPs in another time
        "loss_difference": difference,
    }
