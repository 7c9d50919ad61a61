"""Checks of a run's first steps, for what is wrong with a module and only shows when it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.errors import GradientError
from hetmesh.parallel import ParallelModule, check_replica_gradients, local_gradient, local_part, union_over_ranks
from hetmesh.training.gradients import counted, squared_norm

_TOLERANCE = 0.1
"""A mean in place of a sum is off by half or more, unless few parameters are concerned; a smooth loss by 1e-3."""

_CHANGE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""By which share of itself the loss shall change: rounding is then below a hundredth of the change."""

_MAX_STEP = 0.02
"""By which share of their norm parameters may change: a larger step might not be along a line."""


class FirstSteps:
    """After the first step replicas must have the same gradients. After the second, users' modules must have the
    buffers that the first has left: running statistics depend on which samples a lane and a microbatch happen to hold,
    others in every layout; a cache that the first forward fills does not.

    Args:
        modules: of this rank, in the order of the graph.
        user_modules: names of those that are a user's.
    """

    def __init__(self, modules: Mapping[str, ParallelModule], user_modules: Collection[str], world: World) -> None:
        self.modules = modules
        self.user_modules = user_modules
        self.world = world
        self.taken = 0
        self._buffers: dict[str, Tensor] = {}

    def check(self) -> None:
        """Call it after each step, on all ranks, while its gradients are there. Collective in the first two. Raises
        GradientError: on all ranks."""
        self.taken += 1
        if self.taken == 1:
            check_replica_gradients(self.modules, self.world)
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._current_buffers().items()}
        elif self.taken == 2 and self.user_modules:
            self._check_buffers()
            self._buffers.clear()

    def _current_buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{fqn}": buffer
            for name, part in self.modules.items()
            if name in self.user_modules
            for fqn, buffer in part.module.named_buffers()
        }

    def _check_buffers(self) -> None:
        before, now = self._buffers, self._current_buffers()
        alike = (name for name in now if name in before and before[name].shape == now[name].shape)
        changed = [name for name in alike if not torch.equal(before[name], now[name])]
        if everything := union_over_ranks(changed, self.world, "comparison of buffers"):
            raise GradientError(
                f"forward changes buffers in every step: {', '.join(everything[:8])}"
                f"{' and more' if len(everything) > 8 else ''}. Lanes and microbatches hold other samples in every "
                "layout, so each would compute with other ones: leave them constant, or make them parameters"
            )


def check_gradients(
    parts: Mapping[str, ParallelModule | None], loss: Callable[[], float], total: float, world: World
) -> dict[str, float | None]:
    """Compare the gradient of each part with how the loss changes along it. Collective over all ranks.

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
        step = min(change * abs(total) / (2 * squares), _MAX_STEP * math.sqrt(sizes / squares))
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
