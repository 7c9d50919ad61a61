"""Plans and their errors, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hetmesh.errors import LayoutError, RecipeError
from hetmesh.layout.mesh import MeshSpec
from hetmesh.parallel import (
    apply_tensor_parallel,
    parallelize,
)


@pytest.fixture(scope="module")
def mesh():
    """Rank 1 of four, in a world that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(3)
        self.down = nn.Linear(6, 3)


def blocks() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()]), "head": nn.Linear(3, 5, bias=False)})


def test_shards_follow_torch_chunk(mesh):
    module = blocks()
    full = {name: p.detach().clone() for name, p in module.named_parameters()}
    plan = {
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "blocks.*.norm": "replicated_with_grad_allreduce",
        "head": "colwise_gather_output",
    }
    partial = apply_tensor_parallel(module, mesh, plan)
    assert partial == ("blocks.0.norm.weight", "blocks.0.norm.bias", "blocks.1.norm.weight", "blocks.1.norm.bias")
    own = dict(module.named_parameters())
    assert own.keys() == full.keys()
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        parameter = own[f"blocks.0.{name}"]
        assert torch.equal(parameter.to_local(), full[f"blocks.0.{name}"].chunk(4, dim)[1])
        assert parameter.shape == full[f"blocks.0.{name}"].shape
    assert own["head.weight"].to_local().shape == (2, 3)
    assert module.get_submodule("head").widths == (2, 2, 1, 0)
    assert torch.equal(own["blocks.0.down.bias"], full["blocks.0.down.bias"])


def test_a_torch_style_may_stand_in_a_plan(mesh):
    module = blocks()
    assert apply_tensor_parallel(module, mesh, {"head": ColwiseParallel()}) == ()
    assert module.get_submodule("head").weight.to_local().shape == (2, 3)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.gate": "colwise"}, r"plan of ModuleDict: 'blocks\.\*\.gate' matches no module"),
        ({"blocks.*": "colwise"}, r"'blocks\.\*': style 'colwise' needs an nn.Linear, 'blocks\.0' is a Block"),
        ({"blocks.*.up": "columnwise"}, r"'blocks\.\*\.up' has unknown style 'columnwise'; valid are \['colwise'"),
        ({"blocks": "rowwise"}, r"'blocks' is a ModuleList"),
        ({"b*.0.up": "colwise"}, "matches no module"),
    ],
)
def test_plan_errors_name_pattern_and_module(mesh, plan, message):
    module = blocks()
    before = [type(m) for m in module.modules()]
    with pytest.raises(RecipeError, match=message):
        apply_tensor_parallel(module, mesh, {"head": "colwise", **plan})
    assert [type(m) for m in module.modules()] == before  # checked before anything is touched


def test_mesh_errors(mesh):
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    with pytest.raises(RecipeError, match="takes one mesh axis"):
        apply_tensor_parallel(blocks(), two, {})
    with pytest.raises(LayoutError, match="is not a handle of"):
        parallelize(None, blocks(), MeshSpec.make(range(4), tp=4), two)  # type: ignore[arg-type]
