"""Real steps of one layout on this job's ranks, and what every rank did in one more."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.data.loader import TRAIN
from hetmesh.data.payloads import Payloads
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.runtime import Recording
from hetmesh.simulate.timeline import KINDS, WORK
from hetmesh.training.job import Job
from hetmesh.training.optimizers import make_optimizers, take_step
from hetmesh.training.tune.findings import Finding
from hetmesh.training.tune.guesses import COLLECTIVES, OPTIMIZER, part_name

WARM_UP = 1
"""Steps that are not timed: first contacts, and the optimizer's state."""


def measure(recipe: Recipe, layout: str, steps: int, world: World, payloads: Payloads) -> Finding:
    """Build the modules as `recipe` lays them out and take its first steps; equal on all ranks, on each of which it is
    called. `layout`: the name of the finding. Raises whatever building or a step raises on this rank."""
    started = time.perf_counter()
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    steps_of = _Steps(build(recipe, world, payloads))
    try:
        taken = [steps_of.take(recorded=i == WARM_UP + steps) for i in range(WARM_UP + steps + 1)]
    finally:
        steps_of.job.upcoming.close()
    mine = taken[WARM_UP:-1], steps_of.parts, torch.cuda.max_memory_allocated(world.device) if on_gpu else 0
    everyone = gather_objects(mine, world, "what other ranks measured")
    names = sorted({name for _, parts, _ in everyone for name in parts})
    return Finding(
        layout,
        tuple(max(step) for step in zip(*(own for own, _, _ in everyone), strict=True)),
        {name: statistics.mean(parts.get(name, 0.0) for _, parts, _ in everyone) for name in names},
        max(peak for _, _, peak in everyone),
        max(gather_objects(time.perf_counter() - started, world, "the end of a turn")),
    )


def build(recipe: Recipe, world: World, payloads: Payloads) -> Job:
    """The job of a layout, with new weights: how fast it is does not depend on them."""
    torch.manual_seed(recipe.debug.seed)
    return Job.assemble(resolve(recipe, payloads.sources[TRAIN]), world, payloads)


class _Steps:
    """Takes the steps of a job as the trainer does, but for what that writes."""

    def __init__(self, job: Job) -> None:
        self.job, self.optimizers = job, make_optimizers(job.recipe, job.root)
        self.parts: dict[str, float] = {}

    def take(self, *, recorded: bool) -> float:
        """One step that begins on all ranks at once; its seconds on this rank. Collective."""
        job, world = self.job, self.job.world
        with world.waiting("the next step of other ranks"):
            dist.barrier(group=world.group(range(world.size)))
        world.log.clear()
        if recorded:
            job.runtime.recording, job.runtime.collectives = [], []
        started, computed = time.perf_counter(), 0.0

        def note() -> bool:
            nonlocal computed
            computed = time.perf_counter()
            return False

        planned = job.training_step.draw()
        result = job.training_step.run(planned, job.recipe.training.max_norm, note)
        if self.optimizers is not None:
            take_step(*self.optimizers, update=result.finite)
        world.accelerator.synchronize()
        stopped = time.perf_counter()
        if recorded:
            self.parts = _parts(job.runtime.recording or [], job.runtime.collectives)
            self.parts[OPTIMIZER] = stopped - computed - world.log.agreeing_s
            job.runtime.recording = None
        return stopped - started


def _parts(recording: Recording, collectives: list[tuple[bool, float, float]]) -> dict[str, float]:
    """As `guesses.step_parts` has them, of this rank."""
    parts: dict[str, float] = defaultdict(float)
    for action, start, stop in recording:
        if action.kind in WORK:
            parts[part_name(KINDS[WORK[action.kind]], str(action.target))] += stop - start
    parts[COLLECTIVES] = sum(stop - start for gathers, start, stop in collectives if not gathers)
    return dict(parts)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that memory was too small."""
    seen: Any = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
