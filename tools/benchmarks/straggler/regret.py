"""What `auto` gives away: its measured steps against those of each balancer alone, on the same batches."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.busy import pin
from hetmesh.balance import plan_batch
from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.pool import WorkerPool
from hetmesh.training.job import Job
from hetmesh.training.profile import profile_recipe

SINGLE = ("none", "sorted", "lpt", "disttrain", "entrain", "two_dim")
"""Balancers that `auto` is held against."""


def auto_regret(recipe: Recipe, pool: WorkerPool, batches: int, repetitions: int, seconds: float) -> dict[str, Any]:
    """Of `recipe`, with the costs of its layers measured on this machine first: `auto_regret_measured`, the mean over
    batches of how much longer a step takes with `auto` than with the balancer that is best for that batch; which one
    that is, half of the repetitions say, and the other half how long it takes, so that chance does not make a winner.
    `auto_regret_scatter` is the standard error of that mean.

    Args:
        batches: global batches, each repeated with every balancer.
        seconds: of measuring layers.
    """
    profile = profile_recipe(resolve(recipe), seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "profile.json"))
        profile.save(path)
        profiling = recipe.profiling.model_copy(update={"profile": path})
        measured = recipe.model_copy(update={"profiling": profiling})
        ranks = pool.run(repeated_steps, measured, batches, repetitions, timeout=900)
    spent = [[list(map(max, *both)) for both in zip(*of_batch, strict=True)] for of_batch in zip(*ranks, strict=True)]
    regrets = [regret(of_batch) for of_batch in spent]
    medians = [statistics.median(s for of_batch in spent for s in of_batch[i]) for i in range(1 + len(SINGLE))]
    return {
        "auto_regret_measured": statistics.mean(regrets),
        "auto_regret_scatter": statistics.stdev(regrets) / len(regrets) ** 0.5 if len(regrets) > 1 else 0.0,
        "regret_ms": {name: 1e3 * median for name, median in zip(("auto", *SINGLE), medians, strict=True)},
        "regret_of_batches": [round(one, 4) for one in regrets],
    }


def regret(of_batch: Sequence[Sequence[float]]) -> float:
    """Of one batch.

    Args:
        of_batch: seconds of the repetitions with `auto`, and with each single balancer.
    """
    first, second = ([statistics.median(spent[half::2]) for spent in of_batch] for half in (0, 1))
    shares = []
    for choose, judge in ((first, second), (second, first)):
        best = min(range(1, len(of_batch)), key=lambda i: choose[i])
        shares.append(judge[0] / judge[best] - 1)
    return statistics.mean(shares)


def repeated_steps(rank: int, recipe: Recipe, batches: int, repetitions: int) -> list[list[list[float]]]:
    """Per batch and balancer, `auto` first, the seconds of this rank's repetitions of the step, without its update.
    Balancers take turns, so that whatever else the machine does meets all of them."""
    pin(rank)
    job = Job.assemble(resolve(recipe), World.current())
    found = []
    for batch in range(batches):
        drawn = job.loader.batch(batch)
        plans = []
        for policy in ("auto", *SINGLE):
            balance = replace(job.resolved.balance, policy=policy)
            plans.append(plan_batch(job.graph, drawn.metas, recipe.batch.microbatch_size, balance))
        schedules = [job.schedule(plan) for plan in plans]
        spent: list[list[float]] = [[] for _ in plans]
        for repetition in range(1 + repetitions):
            for i, (plan, schedule) in enumerate(zip(plans, schedules, strict=True)):
                feed = job.feed(drawn, plan, 0)
                dist.barrier()
                started = time.perf_counter()
                job.runtime.run(schedule, plan, feed, step=repetition)
                if repetition:  # the first warms up
                    spent[i].append(time.perf_counter() - started)
                job.root.zero_grad(set_to_none=True)
        found.append(spent)
    return found
