"""What runs on the two ranks: whole steps of every plan, its optimizer alone, and between them what predicts them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.busy import BusyMeter, Sizes, blocks, pin
from benchmarks.schedule.stages import Measured, Probe
from hetmesh.balance import BatchPlan
from hetmesh.boundary import World
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.data.drawn import DrawnBatch
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import LiveBytes
from hetmesh.training.gradients import clip_factor, scale, squared_norm
from hetmesh.training.job import Job
from hetmesh.training.optimizers import make_optimizers, take_step


@dataclass(frozen=True)
class PlanSteps:
    """Of one plan on one rank.

    Attributes:
        seconds: of whole steps, until this rank's parameters are updated.
        optimizer: seconds of normalising, clipping and the optimizer, by themselves.
        measured: what predicts the rest.
        peak_bytes: the most bytes of tensors alive in a step, once there are an optimizer's state and buffers.
    """

    seconds: list[float]
    optimizer: list[float]
    measured: Measured
    peak_bytes: int


def measure(
    rank: int,
    recipes: Sequence[Recipe],
    sizes: Sequence[Sequence[int]],
    rounds: int,
    seconds: float,
    busy: Sizes,
) -> tuple[list[PlanSteps], tuple[list[float], list[float]]]:
    """Rounds over all plans, so that what else happens on the machine meets all alike: every stage by itself, messages,
    sums, the optimizer, a step; and once per round plain code.

    Args:
        sizes: per recipe, samples per microbatch at which its stages are measured, none of them its own.
        seconds: of measuring a plan's stages, and of plain code, in each round.

    Returns:
        Per recipe what was measured; seconds of plain code alone and beside the other rank (`BusyMeter`).
    """
    pin(rank)
    meter = BusyMeter(blocks(busy), seconds)
    peaks = [_peak_bytes(recipe) for recipe in recipes]
    jobs = [_Planned(*given) for given in zip(recipes, sizes, peaks, strict=True)]
    for i in range(rounds):
        for job in jobs:
            job.round(seconds, overhead=i % 4 == 0)
        meter.round()
    return [job.found for job in jobs], (meter.alone, meter.together)


def _peak_bytes(recipe: Recipe) -> int:
    with LiveBytes() as live:
        step = _Step(Job.assemble(resolve(recipe), World.current()))
        for _ in range(2):
            step.run()
        live.restart()
        step.run()
    return live.peak


class _Planned:
    """One plan, built."""

    def __init__(self, recipe: Recipe, sizes: Sequence[int], peak_bytes: int) -> None:
        job = Job.assemble(resolve(recipe), World.current())
        others, lanes = job.loader.batch(1), job.graph.llm.num_lanes
        self.probe, self.least = Probe(job, [others[: size * lanes] for size in sizes]), min(sizes)
        self.step = _Step(job)
        self.found = PlanSteps([], [], self.probe.measured, peak_bytes)
        self.step.run()  # first contacts, and the optimizer's state

    def round(self, seconds: float, *, overhead: bool) -> None:
        self.probe.stages_alone(seconds)
        self.probe.messages()
        self.probe.reductions()
        if overhead:
            self.probe.overhead(self.least)
        self.found.optimizer.append(self.step.update())
        self.found.seconds.append(self.step.run())


class _Step:
    """Steps over the first global batch, as the trainer runs them."""

    def __init__(self, job: Job) -> None:
        self.job, self.optimizers = job, make_optimizers(job.recipe, job.root)
        self.parameters = list(job.root.parameters())
        self.counted = job.counted
        self.drawn: DrawnBatch = job.loader.batch(0)
        self.plan: BatchPlan = job.plan(self.drawn.metas)
        self.schedule = job.schedule(self.plan)

    def run(self) -> float:
        """One step; its seconds."""
        feed = self.job.feed(self.drawn, self.plan, 0)
        if self.optimizers is not None:
            self.optimizers[0].zero_grad()
        dist.barrier()
        started = time.perf_counter()
        self.job.runtime.run(self.schedule, self.plan, feed, step=0)
        self._update()
        return time.perf_counter() - started

    def update(self) -> float:
        """All that comes after the last action, with the gradients that are there; its seconds."""
        dist.barrier()
        started = time.perf_counter()
        self._update()
        return time.perf_counter() - started

    def _update(self) -> None:
        (squares,) = reduce_over_ranks([squared_norm(self.counted)], self.job.world)
        targets = self.plan.num_targets
        scale(self.parameters, clip_factor(squares**0.5 / targets, self.job.recipe.training.max_norm) / targets)
        if self.optimizers is not None:
            take_step(*self.optimizers)
