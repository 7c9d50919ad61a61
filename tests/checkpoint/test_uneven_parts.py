"""What ranks write and read of tensors that tensor parallelism and FSDP split along one dim, where parts are uneven."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hetmesh._torch_compat import StridedShard, fake_process_group
from hetmesh.checkpoint.reading import Planner
from hetmesh.checkpoint.save_plan import SavePlanner


def part(rows, count, index):
    """What FSDP2 and tensor parallelism give rank `index` of `count`."""
    chunks = rows.chunk(count) if len(rows) else ()
    return chunks[index] if index < len(chunks) else rows[:0]


def plans(rows, fsdp, tp, rank):
    """This rank's rows, and what it writes and reads of all, by DCP's plans."""
    mesh = DeviceMesh("cpu", torch.arange(fsdp * tp).view(fsdp, tp), mesh_dim_names=("dp_shard", "tp"))
    shard, column = mesh.get_coordinate()
    local = part(part(rows, tp, column), fsdp, shard).clone()
    placements = [StridedShard(0, split_factor=tp), Shard(0)]
    state = {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=rows.shape, stride=(1,))}
    saving, loading = SavePlanner(), Planner()
    saving.set_up_planner(state, is_coordinator=False)
    whole = [ChunkStorageMetadata(torch.Size([0]), rows.shape)]
    entry = TensorStorageMetadata(TensorProperties(dtype=rows.dtype), rows.shape, whole)
    loading.set_up_planner(state, Metadata({"w": entry}), is_coordinator=False)
    written = [(item.tensor_data.chunk, saving.lookup_object(item.index)) for item in saving.create_local_plan().items]
    read = [
        (item.storage_offsets[0], item.dest_offsets[0], item.lengths[0]) for item in loading.create_local_plan().items
    ]
    return local, written, read


@pytest.mark.parametrize(("fsdp", "tp"), [(3, 2), (2, 3), (4, 2), (2, 2)])
def test_every_row_is_written_once_and_read_where_it_lies(fsdp, tp):
    for count in range(1, 14):
        rows, seen = torch.arange(float(count)), torch.zeros(count)
        for rank in range(fsdp * tp):
            with fake_process_group(fsdp * tp, rank):
                local, written, read = plans(rows, fsdp, tp, rank)
                assert len(written) == len(read) == bool(len(local))  # of no rows nothing
                for chunk, value in written:
                    (start,), (size,) = chunk.offsets, chunk.sizes
                    assert torch.equal(torch.as_tensor(value), rows[start : start + size])
                    seen[start : start + size] += 1
                loaded = torch.full_like(local, -1)
                for source, target, length in read:
                    loaded[target : target + length] = rows[source : source + length]
                assert torch.equal(loaded, local)
        assert torch.equal(seen, torch.ones(count)), count
