"""What each rank writes of a checkpoint: the plan, which all ranks make again only when names or shapes change, and
copies in host memory, so that training can go on."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.errors import CheckpointError
from hetmesh.layout.placements import sharded_dim
from hetmesh.models.weights.fill_module import local_share


class SavePlans:
    """The plan of a run's saves. DCP's planner makes it; its own cache is one per class and process, and not used.

    Attributes:
        metadata: what the checkpoint holds, for its index; on rank 0, once there is a plan.
        made: how often a plan was made.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._saved: dict[str, Any] | None = None
        self._mine: list[WriteItem] = []
        self.metadata: Metadata | None = None
        self.made = 0

    def share(self, state: dict[str, Any]) -> tuple[list[WriteItem], SavePlanner]:
        """What this rank writes of `state`, whose equal entries on several ranks are written by one, and who has the
        values. Collective. Raises CheckpointError: what the ranks have does not fit together; on every rank."""
        planner = SavePlanner()
        planner.set_up_planner(state, is_coordinator=self._world.rank == 0)
        saved = {name: _kind(value) for name, value in planner.state_dict.items()}
        if reduce_over_ranks([float(saved != self._saved)], self._world)[0]:
            self._mine = self._make(planner)
            self._saved = saved
        return self._mine, planner

    def _make(self, planner: DefaultSavePlanner) -> list[WriteItem]:
        size, group = self._world.size, self._world.group(range(self._world.size))
        plans: list[Any] | None = [None] * size if self._world.rank == 0 else None
        shares: list[Any] | None = None
        mine: list[Any] = [None]
        self._saved = None
        with self._world.waiting("the plan of a checkpoint", "all ranks"):
            dist.gather_object(planner.create_local_plan(), plans, dst=0, group=group)
            if plans is not None:
                try:
                    chosen, self.metadata = planner.create_global_plan(plans)
                    shares = [plan.items for plan in chosen]
                except ValueError as error:
                    shares = [str(error)] * size
            dist.scatter_object_list(mine, shares, src=0, group=group)
        (items,) = mine
        if isinstance(items, str):
            raise CheckpointError(f"what the ranks hold is no checkpoint: {items}")
        self.made += 1
        return list(items)


class SavePlanner(DefaultSavePlanner):
    """DCP's, with the parts that ranks hold as FSDP2 cuts them (`uneven_parts`), and values as they were when they were
    held."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[MetadataIndex, Tensor | io.BytesIO] = {}

    @torch.no_grad()
    def hold(self, items: Iterable[WriteItem], memory: Callable[[Tensor], Tensor] | None) -> None:
        """Keep what `items` are now, as it may change once training goes on. `memory`: makes room in the host's memory
        for a copy of a tensor, which a device may make later; None: tensors do not change."""
        for item in items:
            value = self.resolve_data(item)
            if isinstance(value, Tensor) and memory is not None:
                value = memory(value).copy_(value, non_blocking=True)
            self._held[item.index] = value

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        held = self._held.get(write_item.index)
        return super().resolve_data(write_item) if held is None else held

    def create_local_plan(self) -> SavePlan:
        plan, held = super().create_local_plan(), uneven_parts(self.state_dict)
        items = []
        for item in plan.items:
            if (part := held.get(item.index.fqn)) is not None and item.tensor_data is not None:
                if not all(part.sizes):
                    continue
                index = MetadataIndex(item.index.fqn, part.offsets)
                item = replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=part))
            items.append(item)
        self.plan = replace(plan, items=items)
        return self.plan


def uneven_parts(state: Mapping[str, Any]) -> dict[str, ChunkStorageMetadata]:
    """What this rank holds of the tensors for which DCP computes something else.

    Where tensor parallelism and FSDP split the same dim, FSDP2 cuts what the former leaves to a rank. torch 2.13
    computes sizes and offsets in the other order, with another result where parts are uneven: of 7 rows over TP 2 and
    FSDP 3 a rank that holds none would write and read the last one, and the rank that holds it nothing.
    """
    found = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            dims = [sharded_dim(placement) for placement in tensor.placements]
            split = {dim for dim in dims if dim is not None and dims.count(dim) > 1}
            if any(tensor.shape[dim] % tensor.device_mesh.size() for dim in split):
                local, regions = local_share(tensor)
                offsets = [held[0][0] if held else size for held, size in zip(regions, tensor.shape, strict=True)]
                found[name] = ChunkStorageMetadata(torch.Size(offsets), local.shape)
    return found


def _kind(value: Any) -> Any:
    """What a plan depends on. Of a value that is no tensor, nothing."""
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.placements, value.device_mesh
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
