"""Which rank writes what of a checkpoint: made once by all ranks, and again only when the names or shapes change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.boundary.scalars import reduce_over_ranks
from hetmesh.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class SavedEntry:
    """A value that this rank writes: a tensor (this rank's shard of one), or anything that `torch.save` takes."""

    index: MetadataIndex
    value: Any


class SavePlans:
    """The plan of a run's saves. DCP's planner makes it; its own cache is one per class and process, and not used.

    Attributes:
        metadata: what the checkpoint holds, for its index; on rank 0, once there is a plan.
        made: how often a plan was made.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._saved: dict[str, Any] | None = None
        self._mine: list[MetadataIndex] = []
        self.metadata: Metadata | None = None
        self.made = 0

    def share(self, state: dict[str, Any]) -> list[SavedEntry]:
        """What this rank writes of `state`, whose equal entries on several ranks are written by one. Collective.

        Raises:
            CheckpointError: what the ranks have does not fit together; on every rank.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self._world.rank == 0)
        saved = {name: _kind(value) for name, value in planner.state_dict.items()}
        if reduce_over_ranks([float(saved != self._saved)], self._world)[0]:
            self._mine = self._make(planner)
            self._saved = saved
        return [SavedEntry(index, planner.lookup_object(index)) for index in self._mine]

    def _make(self, planner: DefaultSavePlanner) -> list[MetadataIndex]:
        rank, size, group = self._world.rank, self._world.size, self._world.group(range(self._world.size))
        plans: list[Any] | None = [None] * size if rank == 0 else None
        shares: list[Any] | None = None
        mine: list[Any] = [None]
        self._saved = None
        with self._world.waiting("the plan of a checkpoint", "all ranks"):
            dist.gather_object(planner.create_local_plan(), plans, dst=0, group=group)
            if plans is not None:
                try:
                    chosen, self.metadata = planner.create_global_plan(plans)
                    shares = [[item.index for item in plan.items] for plan in chosen]
                except ValueError as error:
                    shares = [str(error)] * size
            dist.scatter_object_list(mine, shares, src=0, group=group)
        if isinstance(mine[0], str):
            raise CheckpointError(f"what the ranks hold is no checkpoint: {mine[0]}")
        self.made += 1
        found: list[MetadataIndex] = mine[0]
        return found


def _kind(value: Any) -> Any:
    """What a plan depends on. Of a value that is no tensor, nothing."""
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.placements, value.device_mesh
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
