"""What each rank writes of a checkpoint: the plan, which all ranks make again only when names or shapes change, and
copies in host memory that stays from save to save, so that training can go on."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.boundary.accelerator import Accelerator, Event
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.errors import CheckpointError
from hetmesh.layout.placements import sharded_dim
from hetmesh.models.weights.fill_module import local_share


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
        """What this rank writes of `state`, whose equal entries on several ranks are written by one. Collective. Raises
        CheckpointError: what the ranks have does not fit together; on every rank."""
        planner = SavePlanner()
        planner.set_up_planner(state, is_coordinator=self._world.rank == 0)
        saved = {name: _kind(value) for name, value in planner.state_dict.items()}
        if reduce_over_ranks([float(saved != self._saved)], self._world)[0]:
            self._mine = self._make(planner)
            self._saved = saved
        return [SavedEntry(index, planner.lookup_object(index)) for index in self._mine]

    def _make(self, planner: DefaultSavePlanner) -> list[MetadataIndex]:
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
                    shares = [[item.index for item in plan.items] for plan in chosen]
                except ValueError as error:
                    shares = [str(error)] * size
            dist.scatter_object_list(mine, shares, src=0, group=group)
        (indices,) = mine
        if isinstance(indices, str):
            raise CheckpointError(f"what the ranks hold is no checkpoint: {indices}")
        self.made += 1
        return list(indices)


class SavePlanner(DefaultSavePlanner):
    """DCP's, with the parts that ranks hold as FSDP2 cuts them (`uneven_parts`)."""

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


class Staging:
    """Memory for one save at a time, as much as this rank writes; pinned where tensors come from a device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers: dict[MetadataIndex, Tensor] = {}

    @torch.no_grad()
    def copy(self, entries: Sequence[SavedEntry]) -> tuple[list[SavedEntry], Event]:
        """Copies of `entries`, and the event after which those of a device's tensors are there; what the device does
        from here on comes after them, and may change the originals. Copies of an earlier call are overwritten."""
        tensors = {entry.index: entry.value.detach() for entry in entries if isinstance(entry.value, Tensor)}
        self._buffers = {index: self._buffer(index, tensor) for index, tensor in tensors.items()}
        if tensors:
            torch._foreach_copy_(list(self._buffers.values()), list(tensors.values()), non_blocking=True)
        event = self._accelerator.event()
        event.record()
        return as_bytes(SavedEntry(e.index, self._buffers.get(e.index, e.value)) for e in entries), event

    def _buffer(self, index: MetadataIndex, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(index)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        if tensor.device.type == "cpu":
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._accelerator.empty_pinned(tensor.contiguous())


def as_bytes(entries: Iterable[SavedEntry]) -> list[SavedEntry]:
    """`entries` with the bytes of those that are no tensors, which may change once training goes on. Equal ones are
    pickled once: options of optimizers are thousands, nearly all alike."""
    known: dict[Any, bytes] = {}

    def pickled(index: MetadataIndex, value: Any) -> bytes:
        key = (type(value), repr(value)) if is_plain(value) else index
        if key not in known:
            stream = io.BytesIO()
            torch.save(value, stream)
            known[key] = stream.getvalue()
        return known[key]

    return [e if isinstance(e.value, Tensor) else SavedEntry(e.index, pickled(e.index, e.value)) for e in entries]


def is_plain(value: Any) -> bool:
    """Whether `value` cannot change, and its `repr` tells it from all others of its type."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
