"""The brute force itself: against torch's own shards, and against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hetmesh._torch_compat import StridedShard
from hetmesh.layout import Layout, MeshSpec, RowSplit
from hetmesh.testing import bounds, strategies

LINE = MeshSpec.make(range(4), a=4)
GRID = MeshSpec.make(range(4), dp=2, tp=2)
PAIR = MeshSpec.make([4, 5], a=2)


def _torch_shards(rank, cases):
    out = []
    meshes = {sizes: DeviceMesh("cpu", torch.arange(4).reshape(sizes)) for sizes in sorted({c[1] for c in cases})}
    for shape, sizes, placements in cases:
        mesh = meshes[sizes]
        value = torch.arange(torch.Size(shape).numel()).reshape(shape)
        out.append(distribute_tensor(value, mesh, placements, src_data_rank=None).to_local())
    return out


def _fsdp_over_tp(rank, features):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(3, features, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(3 * features).reshape(features, 3))
    fully_shard(parallelize_module(model, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
    return model.weight.to_local().detach(), [str(p) for p in model.weight.placements]


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_shares_are_those_of_dtensor(pool4, data):
    cases = []
    for _ in range(10):
        shape = data.draw(strategies.shapes())
        layout = data.draw(strategies.layouts(shape, range(4), partial=False, rows=False, strided=False))
        cases.append((shape, layout.mesh.sizes, layout.placements))
    for rank, shards in enumerate(pool4.run(_torch_shards, cases)):
        for (shape, sizes, placements), shard in zip(cases, shards, strict=True):
            layout = Layout(MeshSpec(range(4), "abc"[: len(sizes)], sizes), placements)
            assert np.array_equal(bounds.element_ids(shape, layout, rank), shard)


@pytest.mark.slow
@pytest.mark.parametrize("features", [8, 6])  # 6: the tensor-parallel halves of 3 rows are cut into 2 and 1
def test_strided_shares_are_those_of_fsdp_over_tensor_parallelism(pool4, features):
    layout = Layout(GRID, [StridedShard(0, split_factor=2), Shard(0)])
    for rank, (shard, placements) in enumerate(pool4.run(_fsdp_over_tp, features)):
        assert placements == [str(p) for p in layout.placements]
        assert np.array_equal(bounds.element_ids((features, 3), layout, rank), shard)


def test_shares_by_hand():
    strided = Layout(GRID, [StridedShard(0, split_factor=2), Shard(0)])
    assert [bounds.element_ids((8,), strided, r).tolist() for r in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    rows = Layout(LINE, [RowSplit(0, (((3, 5), (0, 1)), (), ((1, 3),), ()))])
    assert [bounds.element_ids((5,), rows, r).tolist() for r in range(4)] == [[3, 4, 0], [], [1, 2], []]
    both = Layout(GRID, [Shard(1), Shard(1)])  # 5 columns: 3 + 2, then 2 + 1 and 1 + 1
    assert [bounds.element_ids((1, 5), both, r).tolist() for r in range(4)] == [[[0, 1]], [[2]], [[3]], [[4]]]


@pytest.mark.parametrize(
    ("src", "dst", "elements"),
    [
        (Layout(LINE, [Shard(0)]), Layout(LINE, [Shard(0)]), 0),
        (Layout(LINE, [Replicate()]), Layout(LINE, [Shard(0)]), 0),
        (Layout(LINE, [Shard(0)]), Layout(LINE, [Replicate()]), 4 * 6),  # each rank lacks three quarters of 8
        (Layout(LINE, [Shard(0)]), Layout(PAIR, [Replicate()]), 2 * 8),
        (Layout(LINE, [Shard(0)]), Layout(PAIR, [RowSplit(0, (((0, 5),), ((4, 8),)))]), 5 + 4),
        (Layout(LINE, [Shard(0)]), Layout(GRID, [Shard(0), Replicate()]), 4 * 2),
        (Layout(LINE, [Partial()]), Layout(LINE, [Shard(0)]), 3 * 8),  # a reduce-scatter: (p - 1)/p of p tensors
        (Layout(LINE, [Partial()]), Layout(LINE, [Replicate()]), 3 * 8 + 4 * 6),  # an all-reduce
        (Layout(GRID, [Partial(), Shard(0)]), Layout(PAIR, [Shard(0)]), 8 + 8),
        (Layout(GRID, [Replicate(), Partial()]), Layout(GRID, [Shard(0), Shard(0)]), 8),
        (Layout(LINE, [Shard(0)]), Layout(PAIR, [Partial()]), 8),  # the value at coordinate 0, zeros at 1
    ],
)
def test_bounds_by_hand(src, dst, elements):
    assert bounds.minimal_bytes((8,), src, dst, itemsize=4) == 4 * elements


def test_a_partial_tensor_is_owned_along_the_longest_dim_that_divides_evenly():
    layout = Layout(LINE, [Partial()])
    assert bounds.owned_ids((9, 4), layout)[1].shape == (9, 1)
    assert bounds.owned_ids((9, 5), layout)[3].shape == (0, 5)  # neither divides: 9 is the longest, in chunks of 3
    assert bounds.owned_ids((4, 4), layout)[1].shape == (1, 4)


@pytest.mark.slow
@settings(max_examples=100)
@given(strategies.shapes().flatmap(lambda shape: st.tuples(st.just(shape), strategies.layouts(shape))))
def test_every_element_has_one_owner(case):
    shape, layout = case
    owned = np.concatenate([ids.ravel() for ids in bounds.owned_ids(shape, layout).values()])
    assert sorted(owned.tolist()) == list(range(torch.Size(shape).numel()))
