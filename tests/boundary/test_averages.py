"""A module that averages its gradients beside a boundary, which sums: refused, and right once it is told to sum."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from hetmesh.boundary import backward, device_mesh, redistribute
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, MeshSpec

pytestmark = pytest.mark.slow

LANES = MeshSpec.make([0, 1], dp=2)
ROWS = Layout(LANES, (Shard(0),))


def train(rank, divide, frozen):
    """An encoder and an LLM on ranks 0 and 1, two rows on each. Returns the error, or how far gradients are off."""
    mesh = device_mesh(LANES)
    torch.manual_seed(0)
    rows, encoder, llm = torch.randn(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    llm.requires_grad_(not frozen)
    llm(encoder(rows)).square().sum().backward()
    wanted = [p.grad for p in (*encoder.parameters(), *llm.parameters()) if p.grad is not None]
    encoder.zero_grad()
    llm.zero_grad()
    if rank in LANES:
        fully_shard(llm, mesh=mesh)
        if divide is not None:
            llm.set_force_sum_reduction_for_comms(True)
            llm.set_gradient_divide_factor(divide)
    x = encoder(rows[2 * rank : 2 * rank + 2]) if rank in LANES else None
    y = redistribute(x, ROWS, src=ROWS, shape=(4, 3), dtype=torch.float32, name="vision->llm")
    try:
        backward(llm(y.to_local()).square().sum() if rank in LANES else None)
    except BoundaryError as error:
        return str(error)
    if rank not in LANES:
        return None
    for parameter in encoder.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group())
    got = [
        *(p.grad for p in encoder.parameters()),
        *(p.grad.full_tensor() for p in llm.parameters() if p.grad is not None),
    ]
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))


def test_a_module_that_averages_is_refused(pool4):
    """Before, gradients of the encoder came out doubled, silently."""
    says = (
        "the fully_shard module '.*' averages its gradients over 2 ranks, and boundaries sum theirs: .*by a factor of 2"
    )
    first, second, *others = pool4.run(train, None, False)
    for error in (first, second):
        with pytest.raises(BoundaryError, match=says):
            raise BoundaryError(error)
    assert others == [None, None]


def test_a_module_that_sums_gives_the_gradients_of_one_process(pool4):
    assert all(off is None or off < 1e-5 for off in pool4.run(train, 1.0, False))


def test_a_frozen_module_averages_nothing(pool4):
    assert all(off is None or off < 1e-5 for off in pool4.run(train, None, True))
