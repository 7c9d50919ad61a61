"""Whether gradients are those of the loss: compared, part by part, with what the loss does along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh.boundary import World
from hetmesh.boundary.scalars import reduce_over_ranks
from hetmesh.errors import GradientError
from hetmesh.parallel import ParallelModule, local_gradient, local_part
from hetmesh.training.gradients import counted, squared_norm

_TOLERANCE = 0.1
"""A mean in place of a sum is off by half or more, unless few parameters are concerned; a smooth loss by 1e-3."""

_CHANGE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""By which share of itself the loss shall change: rounding is then below a hundredth of the change."""

_ALIKE = 1e-2
"""Of a gradient's norm: how far apart replicas may compute it."""

_STEP = 0.02
"""Most that parameters may change, of their norm: a larger step might not be along a line."""


def check_replica_gradients(parts: Mapping[str, ParallelModule], world: World) -> None:
    """Compare the gradients of replicas of a parameter, by their norm and their sum. Collective over all ranks.

    Args:
        parts: those of this rank, in the order of the graph.

    Raises:
        GradientError: on all ranks: some differ by more than rounding; a part with tensor parallelism has left
            gradients partial, say.
    """
    wrong: list[str] = []
    for name, part in parts.items():
        named = {fqn: p for fqn, p in part.module.named_parameters() if p.requires_grad}
        for axis in part.spec.axes:
            compared = [fqn for fqn in named if axis not in part.axes[fqn].sharded]
            if not compared or part.spec.axis_size(axis) == 1:
                continue
            own = torch.stack([_summary(named[fqn]) for fqn in compared]).to(world.device)
            every = [torch.empty_like(own) for _ in range(part.spec.axis_size(axis))]
            with world.waiting("comparison of gradients"):
                dist.all_gather(every, own, group=part.device_mesh.get_group(axis))
            table = torch.stack(every).cpu()
            off = (table - table[0]).abs().amax((0, 2)) > _ALIKE * table[..., 0].amax(0)
            wrong += [f"{name}.{compared[i]} (along {axis})" for i in off.nonzero().flatten().tolist()]
    found: list[list[str] | None] = [None] * world.size
    with world.waiting("comparison of gradients"):
        dist.all_gather_object(found, wrong, group=world.group(range(world.size)))
    if everything := list(dict.fromkeys(text for each in found for text in each or ())):
        raise GradientError(
            f"ranks that hold the same parameter have different gradients of it: {', '.join(everything[:8])}"
            f"{' and more' if len(everything) > 8 else ''}; what each rank computed of it must be summed over that "
            "axis, or be the same on all of its ranks (in a tensor_parallel_plan: replicated_with_grad_allreduce)"
        )


def _summary(parameter: nn.Parameter) -> Tensor:
    """Norm of a gradient, and its sum over the root of its size, which is no larger."""
    gradient = local_gradient(parameter)
    if gradient is None or not gradient.numel():
        return torch.zeros(2, dtype=torch.float64)
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return torch.stack([norm, gradient.sum(dtype=torch.float64) / gradient.numel() ** 0.5]).cpu()


def check_gradients(
    parts: Mapping[str, ParallelModule | None], loss: Callable[[], float], total: float, world: World
) -> dict[str, float | None]:
    """Move each part by itself a little up and down its gradient. Collective over all ranks.

    Args:
        parts: in the same order on all ranks; None for one that this rank does not have.
        loss: the summed loss of the batch whose summed gradients the parts have, without gradients.
        total: that loss.

    Returns:
        Per part the ratio of the difference of the loss to what its gradient says; None where nothing can be told.

    Raises:
        GradientError: a ratio is not 1, on all ranks.
    """
    found: dict[str, float | None] = {}
    for name, part in parts.items():
        own = [] if part is None else counted([part], world.rank)
        kinds = [_CHANGE.get(p.dtype, 0.0) for p in own if p.requires_grad]
        low, exact = float(0.0 in kinds), float(any(kind == _CHANGE[torch.float64] for kind in kinds))
        size = sum(float(local_part(p).double().square().sum()) for p in own)
        squares, sizes, low, exact = reduce_over_ranks([squared_norm(own, (), world.device), size, low, exact], world)
        change = _CHANGE[torch.float64 if exact else torch.float32]
        found[name] = None
        if low or not all(math.isfinite(x) and x for x in (squares, sizes, total)):
            continue
        step = min(change * abs(total) / (2 * squares), _STEP * math.sqrt(sizes / squares))
        if 2 * step * squares < change * abs(total) / 100:
            continue  # so flat that rounding would be seen
        up, down = _moved(part, step, loss), _moved(part, -step, loss)
        found[name] = (up - down) / (2 * step * squares)
    wrong = {name: ratio for name, ratio in found.items() if ratio is not None and not abs(ratio - 1) <= _TOLERANCE}
    if wrong:
        told = ", ".join(
            f"those of {name!r} are {1 / ratio:.3g} times what they should be" for name, ratio in wrong.items()
        )
        raise GradientError(
            f"gradients are not those of the loss: {told}. They must be sums over the whole batch: does something "
            "average them over lanes, does a part with tensor parallelism leave them partial, or is the loss a mean? "
            "(A loss that jumps, by routing say, is no case for this: check=False.)"
        )
    return found


@torch.no_grad()
def _moved(part: ParallelModule | None, step: float, loss: Callable[[], float]) -> float:
    parameters = [] if part is None else [p for p in part.parameters_of(0).values() if p.grad is not None]
    kept = [local_part(p).clone() for p in parameters]
    for parameter in parameters:
        gradient = local_gradient(parameter)
        assert gradient is not None
        local_part(parameter).add_(gradient, alpha=step)
    try:
        return loss()
    finally:
        for parameter, before in zip(parameters, kept, strict=True):
            local_part(parameter).copy_(before)
