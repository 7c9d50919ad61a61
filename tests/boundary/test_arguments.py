"""Wrong arguments of the functions that make meshes and Worlds, in a job of one process."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import hetmesh
from hetmesh.errors import BoundaryError, LaunchError, LayoutError
from hetmesh.layout import RowSplit


@pytest.fixture
def world():
    with_one_rank = hetmesh.init(device="cpu", timeout=20)
    yield with_one_rank
    with_one_rank.close()


@pytest.mark.parametrize("seconds", [0, -1, None, "5", True, math.nan, math.inf, 1e300])
def test_a_timeout_is_a_number_of_seconds(seconds):
    for argument in ("timeout", "init_timeout"):
        with pytest.raises(LaunchError, match=f"^{argument} must be a number of seconds above 0"):
            hetmesh.init(**{argument: seconds})
    assert not torch.distributed.is_initialized()


def test_a_later_timeout_too(world):
    with pytest.raises(LaunchError, match=r"above 0 and up to 1e\+09, got -3"):
        world.set_timeout(-3)
    assert world.timeout == 20


@pytest.mark.parametrize("spec", [None, (0,), "0"])
def test_a_device_mesh_needs_a_spec(world, spec):
    with pytest.raises(LayoutError, match=r"device_mesh needs a hetmesh\.MeshSpec, got "):
        hetmesh.device_mesh(spec)


@pytest.mark.parametrize("given", [Shard(0), None, "S", 3, (None,)])
def test_placements_of_a_gradient(world, given):
    """None is none: the default."""
    mesh = hetmesh.MeshSpec((0,), ("dp",), (1,))
    dst, src = hetmesh.Layout(mesh, (RowSplit(0, (((0, 4),),)),)), hetmesh.Layout(mesh, (Replicate(),))

    def call():
        return hetmesh.redistribute(
            torch.ones(4), dst, src=src, shape=(4,), dtype=torch.float32, requires_grad=False, grad_placements=given
        )

    if given is None:
        assert torch.equal(call(), torch.ones(4))
    else:
        with pytest.raises(LayoutError if given == (None,) else BoundaryError, match="placement"):
            call()
