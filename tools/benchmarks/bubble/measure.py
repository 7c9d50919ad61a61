"""What runs on the two ranks: steps of both recipes in turns, and between them stages by themselves and plain code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.busy import BusyMeter, Sizes, blocks, pin
from benchmarks.schedule.stages import Measured, Probe
from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job

WARM_UP = 2  # rounds


@dataclass
class Turns:
    """What one rank measured: of each recipe, and seconds of plain code alone and beside the other rank."""

    measured: list[Measured] = field(default_factory=list)
    busy: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


def measure(
    rank: int, recipes: Sequence[Recipe], sizes: Sequence[int], rounds: int, seconds: float, busy: Sizes
) -> Turns:
    """Rounds of a step of every recipe, the first last in every other round, and of what predicts them.

    Args:
        sizes: samples per microbatch with which stages are measured, none of them the recipes' own.
        seconds: of measuring the stages of each recipe, and of plain code, in each round.
        busy: of the plain code.
    """
    pin(rank)
    meter = BusyMeter(blocks(busy), seconds)
    probes = []
    for recipe in recipes:
        job = Job.assemble(resolve(recipe), World.current())
        others, lanes = job.loader.batch(1), job.graph.llm.num_lanes
        probes.append(Probe(job, [others[: size * lanes] for size in sizes]))
    for i in range(WARM_UP + rounds):
        for probe in probes[:: -1 if i % 2 else 1]:
            step = probe.run_step(probe.job.recipe.batch.microbatch_size)
            if i >= WARM_UP:
                probe.measured.steps.append(step)
        for probe in probes:
            probe.stages_alone(seconds)
            probe.reductions()
            if i % 4 == 0:
                probe.messages()
                probe.overhead(min(sizes))
        meter.round()
    return Turns([probe.measured for probe in probes], (meter.alone, meter.together))
