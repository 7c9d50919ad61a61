"""Real steps of one layout on this job's ranks, and what every rank did in one more."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.data.loader import TRAIN
from hetmesh.data.payloads import Payloads
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime.runtime import Recording
from hetmesh.simulate.timeline import KINDS, WORK, collectives_inside
from hetmesh.training.job import Job
from hetmesh.training.tune.findings import Finding
from hetmesh.training.tune.guesses import COLLECTIVES, OPTIMIZER, part_name

WARM_UP = 1
"""Steps that are not timed: first contacts, and the optimizer's state."""


class Ranks:
    """The ranks of this job, which take steps in one layout after another. Modules go from each layout to the next
    (`Job.relayout`); only the first is built.

    Args:
        payloads: where samples are loaded.

    Attributes:
        job: in the newest layout; None before the first.
    """

    def __init__(self, world: World, payloads: Payloads) -> None:
        self.world, self.payloads = world, payloads
        self.job: Job | None = None

    def measure(self, recipe: Recipe, layout: str, steps: int) -> Finding:
        """Take the first steps of `recipe` in its layout; equal on all ranks, on each of which it is called. `layout`:
        the name of the finding. Raises whatever going to the layout or a step raises on this rank; no further layout
        can be measured then."""
        started, world = time.perf_counter(), self.world
        job = self._in_layout(recipe)
        on_gpu = world.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        try:
            taken = [_step(job, recorded=i == WARM_UP + steps) for i in range(WARM_UP + steps + 1)]
        finally:
            job.upcoming.close()
        timed, parts = [seconds for seconds, _ in taken[WARM_UP:-1]], taken[-1][1]
        mine = timed, parts, torch.cuda.max_memory_allocated(world.device) if on_gpu else 0
        everyone = gather_objects(mine, world, "what other ranks measured")
        names = sorted({name for _, parts, _ in everyone for name in parts})
        return Finding(
            layout,
            tuple(max(step) for step in zip(*(own for own, _, _ in everyone), strict=True)),
            {name: statistics.mean(parts.get(name, 0.0) for _, parts, _ in everyone) for name in names},
            max(peak for _, _, peak in everyone),
            max(gather_objects(time.perf_counter() - started, world, "the end of a turn")),
        )

    def _in_layout(self, recipe: Recipe) -> Job:
        """The job in the layout of `recipe`, before the first step of the data."""
        if self.job is not None:
            self.job.loader.step = 0  # layouts are compared by the same samples
            with suppress(RecipeError):  # what cannot move is built, and whatever is wrong with the recipe said again
                self.job.relayout(recipe)
                return self.job
        self.job = None  # its memory is needed
        torch.manual_seed(recipe.debug.seed)
        resolved = resolve(recipe, self.payloads.sources[TRAIN])
        self.job = Job.assemble(resolved, self.world, self.payloads)
        return self.job


def _step(job: Job, *, recorded: bool) -> tuple[float, dict[str, float]]:
    """One step, as the trainer takes it but for what that writes, which begins on all ranks at once: its seconds on
    this rank and, where it is recorded, their parts. Collective."""
    world, parts = job.world, dict[str, float]()
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
    if job.optimizers is not None and result.finite:
        job.optimizers[0].step()  # rates stay those of the first step, however many there are
    world.accelerator.synchronize()
    stopped = time.perf_counter()
    if recorded:
        parts = _parts(job.runtime.recording or [], job.runtime.collectives)
        parts[OPTIMIZER] = stopped - computed - world.log.agreeing_s
        job.runtime.recording = None
    return stopped - started, parts


def _parts(recording: Recording, collectives: list[tuple[bool, float, float]]) -> dict[str, float]:
    """As `guesses.step_parts` has them, of this rank."""
    parts: dict[str, float] = defaultdict(float)
    for action, start, stop in recording:
        if action.kind in WORK:
            parts[part_name(KINDS[WORK[action.kind]], str(action.target))] += stop - start
    parts[COLLECTIVES] = collectives_inside(recording, collectives)[1]
    return dict(parts)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that memory was too small."""
    seen: Any = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
