"""What is wrong with a module and only shows when it trains: looked for behind a job's first two steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.errors import GradientError
from hetmesh.parallel import ParallelModule
from hetmesh.training.gradient_check import check_replica_gradients


class FirstSteps:
    """Behind the first step replicas must have the same gradients. Behind the second, modules of one's own must have
    the buffers that the first has left: running statistics are of the samples that a lane and a microbatch happen to
    hold, other ones in every layout; a cache that a first forward fills is none of that.

    Args:
        modules: of this rank, in the order of the graph.
        own: names of those that are a user's.
    """

    def __init__(self, modules: Mapping[str, ParallelModule], own: Collection[str], world: World) -> None:
        self.modules, self.own, self.world = modules, own, world
        self.taken = 0
        self._buffers: dict[str, Tensor] = {}

    def check(self) -> None:
        """Call it behind each step, on all ranks, while its gradients are there. Collective in the first two.

        Raises:
            GradientError: on all ranks.
        """
        self.taken += 1
        if self.taken == 1:
            check_replica_gradients(self.modules, self.world)
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._now().items()}
        elif self.taken == 2 and self.own:
            self._check_buffers()
            self._buffers.clear()

    def _now(self) -> dict[str, Tensor]:
        own = {name: each.module for name, each in self.modules.items() if name in self.own}
        return {f"{name}.{fqn}": buffer for name, module in own.items() for fqn, buffer in module.named_buffers()}

    def _check_buffers(self) -> None:
        before, now = self._buffers, self._now()
        alike = (name for name in now if name in before and before[name].shape == now[name].shape)
        changed = [name for name in alike if not torch.equal(before[name], now[name])]
        found: list[list[str] | None] = [None] * self.world.size
        with self.world.waiting("comparison of buffers"):
            dist.all_gather_object(found, changed, group=self.world.group(range(self.world.size)))
        if everything := list(dict.fromkeys(name for each in found for name in each or ())):
            raise GradientError(
                f"forward changes buffers in every step: {', '.join(everything[:8])}"
                f"{' and more' if len(everything) > 8 else ''}. Lanes and microbatches hold other samples in every "
                "layout, so each would compute with other ones: leave them constant, or make them parameters"
            )
