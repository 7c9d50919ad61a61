"""Where a loss or gradient that is not finite was seen, for the error that names it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh.boundary import World
from hetmesh.parallel import local_gradient
from hetmesh.parallel.gradients import local_part

_SHOWN = 8  # ranks


def describe_non_finite(root: nn.Module, loss_sum: Tensor | float, world: World) -> str:
    """What is not finite, and where, e.g. `"the loss (rank 2) and gradients of vision (ranks 0, 1)"`.

    Collective over all ranks; called in the rare step in which the sum over all ranks was not finite, so that the usual
    one needs a single number.

    Args:
        root: the modules of this rank, by name.
        loss_sum: of this rank.
    """
    everyone: list[list[str]] = [[] for _ in range(world.size)]
    with world.waiting("names of modules whose gradients are not finite"):
        dist.all_gather_object(everyone, _found(root, loss_sum), group=world.group(range(world.size)))
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(everyone):
        for what in found:
            ranks.setdefault(what, []).append(rank)
    if not ranks:
        return "the gradient norm, too large for a number,"
    return " and ".join(f"{what} ({_ranks_text(ranks[what])})" for what in sorted(ranks, reverse=True))


@torch.no_grad()
def _found(root: nn.Module, loss_sum: Tensor | float) -> list[str]:
    found = [] if torch.isfinite(torch.as_tensor(loss_sum)) else ["the loss"]
    for name, module in root.named_children():
        parameters = list(module.parameters())
        if not all(bool(torch.isfinite(local_part(p)).all()) for p in parameters):
            found.append(f"parameters of {name}")  # an earlier step has broken them, or what they were loaded from
        gradients = [g for g in map(local_gradient, parameters) if g is not None]
        if not all(bool(torch.isfinite(g).all()) for g in gradients):
            found.append(f"gradients of {name}")
    return found


def _ranks_text(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
