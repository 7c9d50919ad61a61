"""Scalars of all ranks of a job: summed, or gathered."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary.world import World


def reduce_over_ranks(values: Iterable[Tensor | float], world: World) -> list[float]:
    """Sum some scalars over all ranks of the job, in float64. Collective; the host waits for the device, once."""
    stacked = torch.stack([_scalar(value, world.device) for value in values])
    group = world.group(range(world.size))
    began = time.perf_counter()
    with world.waiting("sum of losses and norms over all ranks"):
        dist.all_reduce(stacked, group=group)
        sums = stacked.tolist()
    world.log.agreeing_s += time.perf_counter() - began
    return sums


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)  # filled there: nothing is copied


def gather_over_ranks(values: list[float], world: World, more: torch.Tensor | None = None) -> torch.Tensor:
    """`values` of every rank, and behind them `more`, which lies on its device: float64 `[ranks, numbers]` on the CPU.
    Collective over all ranks of the job."""
    own = world.accelerator.pinned(torch.tensor(values, dtype=torch.float64)).to(world.device, non_blocking=True)
    own = own if more is None else torch.cat([own, more])
    everyone = torch.zeros(world.size, len(own), dtype=torch.float64, device=world.device)
    everyone[world.rank] = own
    with world.waiting("metrics of all ranks"):
        dist.all_reduce(everyone, group=world.group(range(world.size)))
        return everyone.cpu()
