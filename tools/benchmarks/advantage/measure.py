"""What runs on the two ranks: first what a prediction needs of the machine, then steps of two layouts in turns."""

from __future__ import annotations

import runpy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.busy import BusyMeter, Sizes, blocks, busy_slowdown
from hetmesh.boundary import World
from hetmesh.cost.fitted import non_negative_least_squares
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer

WARM_UP = 2  # rounds
_MESSAGES = (1 << 14, 1 << 16, 1 << 18, 1 << 20)  # bytes of a sum over the ranks
_PARAMETERS = 1 << 21
_UPDATED = 32  # bytes per parameter that the simulator takes AdamW, clipping included, to read and write
_RECIPES = Path(__file__).parents[3] / "recipes"
ClipTower = runpy.run_path(str(_RECIPES / "digits_video_tower.py"))["ClipTower"]
VideoDigitsSource = runpy.run_path(str(_RECIPES / "digits_video_data.py"))["VideoDigitsSource"]
"""The encoder and the data of recipes/digits_video.toml, for recipes that do not lie beside them."""
_BUSY = Sizes(256, 704, layers=2, samples=2, tokens=256)

_MACHINE = """source = "measured by bench.py advantage before its runs"
memory_bandwidth = {bandwidth}
node_bandwidth = {link}
network_bandwidth = {link}
node_latency = {latency}
network_latency = {latency}
busy_slowdown = {slowdown}
"""


@dataclass
class Machine:
    """What one rank measured of the machine.

    Attributes:
        sums: bytes -> seconds of each sum over the ranks.
        updates: seconds of clipping and AdamW, each time.
        busy: of plain code alone and beside the other rank (`BusyMeter`).
    """

    sums: dict[int, list[float]] = field(default_factory=dict)
    updates: list[float] = field(default_factory=list)
    busy: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


def measure_machine(rank: int, rounds: int, seconds: float) -> Machine:
    """Sums over the ranks, the optimizer on both ranks at once, plain code alone and together, in turns."""
    torch.set_num_threads(1)
    found, meter = Machine(), BusyMeter(blocks(_BUSY), seconds)
    parameter = torch.nn.Parameter(torch.randn(_PARAMETERS))
    parameter.grad = torch.randn(_PARAMETERS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for _ in range(rounds):
        for size in _MESSAGES:
            buffer = torch.zeros(size // 4)
            for _ in range(4):
                dist.barrier()
                started = time.perf_counter()
                dist.all_reduce(buffer)
                found.sums.setdefault(size, []).append(time.perf_counter() - started)
        dist.barrier()
        started = time.perf_counter()
        parameter.grad.mul_(1 / (1 + parameter.grad.square().sum()))
        optimizer.step()
        found.updates.append(time.perf_counter() - started)
        meter.round()
    found.busy = meter.alone, meter.together
    return found


def machine_file(ranks: Sequence[Machine]) -> str:
    """A machine's TOML, from what the ranks measured."""
    medians = [(size, statistics.median(seconds)) for each in ranks for size, seconds in each.sums.items()]
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*medians, strict=True))
    # A sum over two ranks is a message each way, of half the bytes (`cost/collective_time.py`).
    features = np.stack([np.full_like(sizes, 2.0), sizes], axis=1) / seconds[:, None]
    latency, per_byte = non_negative_least_squares(features, np.ones(len(seconds)))
    slowdown = busy_slowdown(each.busy for each in ranks)
    update = max(statistics.median(each.updates) for each in ranks) / slowdown[-1]
    return _MACHINE.format(
        bandwidth=_PARAMETERS * _UPDATED / update,
        link=1 / per_byte if per_byte else 0.0,
        latency=latency,
        slowdown=[round(factor, 4) for factor in slowdown],
    )


@dataclass
class Turns:
    """Of one rank, per layout: seconds and losses of its steps; and what plain code says of the machine meanwhile."""

    seconds: tuple[list[float], ...]
    losses: tuple[list[float], ...]
    busy: tuple[list[float], list[float]]
    kept_off: list[float]


def measure(rank: int, recipes: Sequence[Recipe], rounds: int, seconds: float) -> Turns:
    """Rounds of a step of every recipe, the first last in every other round; both ranks begin each step together.

    Args:
        seconds: of plain code, after each round.
    """
    torch.set_num_threads(1)
    meter = BusyMeter(blocks(_BUSY), seconds)
    turns = Turns(tuple([] for _ in recipes), tuple([] for _ in recipes), ([], []), [])
    with tempfile.TemporaryDirectory() as folder:
        trainers = [_trainer(recipe, Path(folder, str(i))) for i, recipe in enumerate(recipes)]
        for i in range(WARM_UP + rounds):
            order = list(enumerate(trainers))
            for k, trainer in order[:: -1 if i % 2 else 1]:
                dist.barrier()
                started = time.perf_counter()
                loss = trainer.train_step().loss
                if i >= WARM_UP:
                    turns.seconds[k].append(time.perf_counter() - started)
                turns.losses[k].append(loss)
            if i >= WARM_UP:
                meter.round()
        for trainer in trainers:
            trainer.upcoming.close()
            trainer.reporter.close()
    turns.busy, turns.kept_off = (meter.alone, meter.together), meter.kept_off
    return turns


def _trainer(recipe: Recipe, folder: Path) -> Trainer:
    job = recipe.job.model_copy(update={"dump_folder": str(folder)})
    return Trainer(resolve(recipe.model_copy(update={"job": job})), World.current())
