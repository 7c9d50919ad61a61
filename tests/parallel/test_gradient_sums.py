"""Sums of gradients over groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from hetmesh.parallel import gradient_sums, sum_gradients


def parameters(rank: int) -> list[nn.Parameter]:
    """Of several dtypes and kinds; rank r misses the gradient of parameter r, all miss the last."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    made = [
        nn.Parameter(torch.ones(5)),
        nn.Parameter(torch.ones(2, 2, dtype=torch.float64)),
        nn.Parameter(torch.ones(())),
        nn.Parameter(torch.ones(0, 4)),
        nn.Parameter(sharded),
        nn.Parameter(torch.ones(3)),
    ]
    for i, parameter in enumerate(made[:-1]):
        if i != rank:
            parameter.grad = torch.full_like(parameter, 10.0 * (rank + 1) + i)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    return [*made, frozen]


def summed(rank: int, bucket_bytes: int):
    given = parameters(rank)
    old, gradient_sums.BUCKET_BYTES = gradient_sums.BUCKET_BYTES, bucket_bytes
    try:
        sum_gradients(given, [dist.group.WORLD])
    finally:
        gradient_sums.BUCKET_BYTES = old
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in given)
    assert isinstance(given[4].grad, DTensor)
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in given]
    return [None if g is None else g.flatten().tolist() for g in local]


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1, 30, 2**20])
def test_sums_count_missing_gradients_as_zero_unless_all_miss_them(pool, bucket_bytes):
    expected = [[20.0] * 5, [11.0] * 4, [34.0], [], [38.0] * 6, None, None]
    assert pool(2).run(summed, bucket_bytes) == [expected, expected]


def partial_gradient(rank: int):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)], run_check=False))
    parameter.grad = DTensor.from_local(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mesh, [Partial()], run_check=False)
    sum_gradients([parameter], [dist.group.WORLD])
    return parameter.grad.placements == (Shard(0),), parameter.grad.to_local().tolist()


@pytest.mark.slow
def test_a_gradient_left_partial_is_brought_to_its_parameters_placements_first(pool):
    """Both shards then add up, since the group here spans the shards."""
    total = [[2.0 + 6.0, 4.0 + 8.0]]
    assert pool(2).run(partial_gradient) == [(True, total), (True, total)]


def one_rank(rank: int):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    sum_gradients([parameter], [])
    sum_gradients([], [dist.group.WORLD])
    return parameter.grad.tolist()


@pytest.mark.slow
def test_nothing_to_sum(pool):
    assert pool(2).run(one_rank) == [[1.0, 1.0]] * 2
