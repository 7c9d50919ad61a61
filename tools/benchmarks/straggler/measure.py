"""What runs on the two ranks: steps of all recipes in turns, and between them stages by themselves, messages and plain
code."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from benchmarks.busy import BusyMeter, Sizes, blocks, pin
from benchmarks.schedule.stages import Measured, Probe
from hetmesh.boundary import World
from hetmesh.data.drawn import DrawnBatch
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer

WARM_UP = 2  # rounds


@dataclass
class Steps:
    """Of one recipe, per step.

    Attributes:
        batches: which global batch it was.
        seconds: that the step took.
        planning: seconds that the training thread spent to get the step: drawing, balancing, planning, scheduling.
    """

    batches: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    planning: list[float] = field(default_factory=list)


def measure(
    rank: int, recipes: Sequence[Recipe], rounds: int, seconds: float, busy: Sizes
) -> tuple[list[Steps], Measured]:
    """Rounds of a step of every recipe and of what predicts it; both ranks begin and end each step together.

    Args:
        seconds: of measuring stages by themselves, and of plain code, in each round.
        busy: of the plain code.
    """
    pin(rank)
    meter = BusyMeter(blocks(busy), seconds)
    with tempfile.TemporaryDirectory() as folder:
        trainers = [_trainer(recipe, Path(folder, str(i))) for i, recipe in enumerate(recipes)]
        steps = [Steps() for _ in trainers]
        job = trainers[0].job
        probe = Probe(job, some_microbatches(job.loader.batch(10_000)))
        for i in range(WARM_UP + rounds):
            for trainer, spent in zip(trainers, steps, strict=True):
                batch = trainer.job.loader.step
                dist.barrier()
                started = time.perf_counter()
                trainer.train_step()
                if i >= WARM_UP:
                    spent.seconds.append(time.perf_counter() - started)
                    spent.batches.append(batch)
                    spent.planning.append(trainer.upcoming.wait_s)
            probe.stages_alone(seconds)
            probe.messages()
            probe.reductions()
            if i % 4 == 0:
                probe.overhead(1)
            meter.round()
        for trainer in trainers:
            trainer.upcoming.close()
            trainer.reporter.close()
    probe.measured.busy = meter.alone, meter.together
    return steps, probe.measured


def some_microbatches(drawn: DrawnBatch) -> list[DrawnBatch]:
    """Of other samples than those of the steps: short and long ones by themselves, and some together."""
    by_length = sorted(range(len(drawn)), key=lambda i: drawn[i].meta.tokens)
    places = [by_length[round(share * (len(drawn) - 1))] for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)]
    return [*(drawn[i : i + 1] for i in places), drawn[:2], drawn[2:5], drawn[5:9]]


def _trainer(recipe: Recipe, folder: Path) -> Trainer:
    job = recipe.job.model_copy(update={"dump_folder": str(folder)})
    return Trainer(resolve(recipe.model_copy(update={"job": job})), World.current())
