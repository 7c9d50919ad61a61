"""Gradients of the whole model: scaled once, one global norm over all meshes with replicas counted once, one clip."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh.boundary import World
from hetmesh.layout import MeshSpec
from hetmesh.parallel import holds_first_replica, local_gradient


def _local(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [g for g in map(local_gradient, parameters) if g is not None]


@torch.no_grad()
def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`."""
    grads = _local(parameters)
    if grads:
        torch._foreach_mul_(grads, factor)


@torch.no_grad()
def squared_norm(modules: Iterable[tuple[nn.Module, MeshSpec]], rank: int) -> Tensor:
    """This rank's part of the squared 2-norm of all gradients: what it holds the first replica of. Float64, 0-d.

    The sum over all ranks of the job is the squared norm of the whole model, whatever the meshes.
    """
    total = torch.zeros((), dtype=torch.float64)
    for module, mesh in modules:
        mine = _local(p for p in module.parameters() if holds_first_replica(p, mesh, rank))
        if mine:
            norms = torch.stack(torch._foreach_norm(mine, 2))
            total += norms.double().square().sum().cpu()
    return total


def reduce_over_ranks(values: Iterable[Tensor | float], world: World) -> list[float]:
    """Sum some scalars over all ranks of the job, in float64. Collective."""
    stacked = torch.tensor([float(v) for v in values], dtype=torch.float64, device=world.device)
    group = world.group(range(world.size))
    with world.waiting("sum of losses and norms over all ranks"):
        dist.all_reduce(stacked, group=group)
    return stacked.tolist()


def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients down so that their global norm is at most `max_norm` (0: never), as torch's clipping does."""
    factor = max_norm / (norm + 1e-6)
    if 0 < factor < 1 and math.isfinite(norm):
        scale(parameters, factor)
