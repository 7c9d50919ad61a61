"""The map from parameter to the axes over which its gradient is summed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetmesh.boundary import World
from hetmesh.layout.mesh import MeshSpec
from hetmesh.parallel import ParameterAxes, gradient_axes
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job

PLAIN = {"norm": nn.Parameter(torch.zeros(2)), "q_norm": nn.Parameter(torch.zeros(2))}


def test_a_gradient_is_summed_over_the_axes_along_which_ranks_see_something_else():
    spec = MeshSpec.make(range(8), dp_replicate=2, cp=2, tp=2)
    axes = gradient_axes(PLAIN, spec, partial_over_tp=["q_norm"])
    assert axes == {
        "norm": ParameterAxes(summed=("dp_replicate", "cp")),
        "q_norm": ParameterAxes(summed=("tp", "dp_replicate", "cp")),
    }
    assert [rank for rank in range(9) if axes["norm"].is_first_replica(spec, rank)] == [0]


def test_fsdp_sums_over_lanes_in_the_backward_and_nothing_else():
    spec = MeshSpec.make(range(16), dp_replicate=2, dp_shard=2, cp=2, tp=2)
    axes = gradient_axes(PLAIN, spec, partial_over_tp=["q_norm"])
    assert axes["norm"].in_backward == axes["q_norm"].in_backward == ("dp_replicate", "dp_shard")
    assert axes["norm"].after_backward == ("cp",)
    assert axes["q_norm"].after_backward == ("tp", "cp")


def maps(rank: int, recipe) -> dict[str, dict[str, ParameterAxes]]:
    return {name: dict(each.axes) for name, each in Job.assemble(resolve(recipe), World.current()).parallel.items()}


@pytest.mark.slow
def test_the_map_of_sharded_modules_says_along_which_axes_they_are_sharded(pool4):
    recipe = load_recipe("recipes/digits_fsdp.toml")
    for each in pool4.run(maps, recipe):
        llm = each["llm"]
        assert llm["model.layers.0.mlp.up_proj.weight"] == ParameterAxes(
            ("dp_shard",), ("dp_shard",), ("dp_shard", "tp")
        )
        assert llm["model.norm.weight"] == ParameterAxes(("dp_shard",), ("dp_shard",), ("dp_shard",))
        assert llm["model.layers.0.self_attn.q_norm.weight"] == ParameterAxes(
            ("tp", "dp_shard"), ("dp_shard",), ("dp_shard",)
        )
