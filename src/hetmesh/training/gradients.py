"""Gradients of the whole model: one global norm over all meshes with replicas counted once, scaled and clipped once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.parallel import ParallelModule, local_gradient
from hetmesh.runtime import Runtime


def _local(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [g for g in map(local_gradient, parameters) if g is not None]


@torch.no_grad()
def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`."""
    grads = _local(parameters)
    if grads:
        torch._foreach_mul_(grads, factor)


@torch.no_grad()
def squared_norm(
    parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter] = (), device: torch.device | None = None
) -> Tensor:
    """The squared 2-norm of this rank's parts of the gradients of `parameters`, on any devices. Float64, 0-d.

    Args:
        others: parameters that another rank counts. Their gradients add nothing, unless one of them is not finite: then
            the result is not either, so that the sum over all ranks is one verdict on every gradient of every rank.
        device: of the result; None: the CPU.
    """
    devices: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}  # those of offloaded modules lie on the CPU
    for which, these in enumerate((parameters, others)):
        for gradient in _local(these):
            devices.setdefault(gradient.device, ([], []))[which].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for mine, theirs in devices.values():
        squares = _norms([*mine, *theirs]).square()
        own = squares[: len(mine)].sum() + 0.0 * squares[len(mine) :].sum()  # 0 * inf and 0 * nan are nan
        total += own.to(total.device, non_blocking=total.device.type != "cpu")  # what comes from a device is waited for
    return total


def _norms(gradients: list[Tensor]) -> Tensor:
    """The 2-norms of tensors on one device, float64."""
    if gradients[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(gradients, 2)).double()
    # Row by row, as torch adds up the squares of a whole tensor one after the other there: in fp32 that is 8e-5 off for
    # 2,048 x 2,048 elements, and 4% for 2^28. In float64 it would take a copy, and ten times as long.
    rows = (torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients)
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in rows])


def counted(modules: Iterable[ParallelModule], rank: int, elsewhere: Collection[int] = ()) -> list[nn.Parameter]:
    """The parameters of which `rank` holds the first replica: the sum of their `squared_norm` over all ranks of the job
    is that of the whole model, whatever the meshes. `elsewhere`: ids of parameters of which another pipeline stage
    holds the first copy."""
    return [
        p
        for each in modules
        for name, p in each.module.named_parameters()
        if id(p) not in elsewhere and each.axes[name].is_first_replica(each.spec, rank)
    ]


def clip_factor(norm: float, max_norm: float) -> float:
    """What scales gradients of global norm `norm` down to `max_norm` (0: never), as torch's clipping does."""
    factor = max_norm / (norm + 1e-6)
    return factor if 0 < factor < 1 and math.isfinite(norm) else 1.0


class GlobalGradients:
    """The gradients of all modules of a job. A batch leaves sums over the whole batch; this is where they are divided.

    Args:
        runtime: runs the batches.
        parameters: of this rank.
        counted: those of them that this rank counts in a norm (`counted`).
    """

    def __init__(self, runtime: Runtime, parameters: Iterable[nn.Parameter], counted: Iterable[nn.Parameter]) -> None:
        self.runtime, self.parameters, self.counted = runtime, list(parameters), list(counted)
        here = set(map(id, self.counted))
        self._counted_elsewhere = [p for p in self.parameters if id(p) not in here]

    def clear(self) -> None:
        """Drop the gradients of this rank."""
        for parameter in self.parameters:
            parameter.grad = None

    def settle(self, loss_sums: Sequence[Tensor | float], stop: bool = False) -> tuple[list[float], float, bool]:
        """Make gradients final, and sum over all ranks: the losses, the norm of its gradient over all modules (replicas
        counted once; not finite if any gradient of any rank is not), and whether any rank says `stop`. Collective. The
        host waits for the device once; twice where gradients were not final.

        Args:
            loss_sums: of this rank; 0 where another rank counts it.
        """
        world, norm = self.runtime.world, self._squared_norm()
        given = [*loss_sums, norm, self.runtime.changed, stop]
        *losses, squares, changed, asked = reduce_over_ranks(given, world)
        if changed:
            self.runtime.settle()
            (squares,) = reduce_over_ranks([self._squared_norm()], world)
        return losses, math.sqrt(squares), asked > 0

    def norm(self) -> float:
        """The norm of the gradients of all ranks as they are, replicas counted once. Collective."""
        return math.sqrt(reduce_over_ranks([self._squared_norm()], self.runtime.world)[0])

    def normalise(self, divisor: float, grad_norm: float, max_norm: float) -> None:
        """Divide gradients by `divisor`, what a loss counts of the whole batch, and clip their norm, which is then
        `grad_norm`, to `max_norm`; 0 does not clip."""
        scale(self.parameters, clip_factor(grad_norm, max_norm) / divisor)

    def _squared_norm(self) -> Tensor:
        return squared_norm(self.counted, self._counted_elsewhere, self.runtime.world.device)
