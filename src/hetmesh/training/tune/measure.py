"""Real steps of one layout on this job's ranks, and what every rank did in the last of them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hetmesh.boundary import World
from hetmesh.boundary.accelerator import Accelerator
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
from hetmesh.training.tune.turns import STEPS

WARM_UP = 1
"""Steps that are not timed: first contacts, and the optimizer's state."""
_ROWS, _WIDTH, _INNER, _REPEATS = 128, 320, 880, 16  # of the reference work: 30 ms of a CPU's core


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
        self._reference = _Reference(world.accelerator)
        self._tokens: list[int] = []  # of the first steps

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
            taken, paces = [], []
            for i in range(WARM_UP + steps):
                paces.append(self._pace())
                taken.append(_step(job, recorded=i == WARM_UP + steps - 1))
            paces.append(self._pace())
        finally:
            job.upcoming.close()
        scales = self._scales(job, len(taken))
        timed = [scale * seconds for scale, (seconds, _) in zip(scales, taken, strict=True)][WARM_UP:]
        parts = {name: scales[-1] * seconds for name, seconds in taken[-1][1].items()}
        mine = timed, parts, torch.cuda.max_memory_allocated(world.device) if on_gpu else 0, statistics.median(paces)
        everyone = gather_objects(mine, world, "what other ranks measured")
        names = sorted({name for _, parts, _, _ in everyone for name in parts})
        return Finding(
            layout,
            tuple(max(step) for step in zip(*(own for own, _, _, _ in everyone), strict=True)),
            {name: statistics.mean(parts.get(name, 0.0) for _, parts, _, _ in everyone) for name in names},
            max(peak for _, _, peak, _ in everyone),
            max(gather_objects(time.perf_counter() - started, world, "the end of a turn")),
            statistics.mean(pace for _, _, _, pace in everyone),
        )

    def _scales(self, job: Job, steps: int) -> list[float]:
        """By which the seconds of each of the first steps become those of a step with as many tokens as their mean."""
        for step in range(len(self._tokens), max(steps, WARM_UP + STEPS)):
            self._tokens.append(int(job.loader.batch(step).metas.tokens.sum()))
        return [statistics.mean(self._tokens[: WARM_UP + STEPS]) / tokens for tokens in self._tokens[:steps]]

    def _pace(self) -> float:
        """Seconds of the reference work on this rank, while all ranks do it. Collective."""
        with self.world.waiting("the reference work of other ranks"):
            dist.barrier(group=self.world.group(range(self.world.size)))
        return self._reference.seconds()

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


class _Reference:
    """Work that is always the same, a linear layer forward and backward: how fast a rank is at the moment. Other work
    on its machine slows a step down as much (on two cores, to 2 to 3 times); of an accelerator it shows the host."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rows = torch.ones(_ROWS, _WIDTH, device=accelerator.device)
        self.weight = torch.ones(_INNER, _WIDTH, device=accelerator.device, requires_grad=True)

    def seconds(self) -> float:
        """Of doing it once."""
        self.accelerator.synchronize()
        started = time.perf_counter()
        for _ in range(_REPEATS):
            torch.autograd.grad(F.silu(F.linear(self.rows, self.weight)).sum(), self.weight)
        self.accelerator.synchronize()
        return (time.perf_counter() - started) / _REPEATS


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
