"""Mixture-of-experts blocks whose experts lie on an `ep` axis: tokens go to their experts, and their sums come back."""

from hetmesh.parallel.experts.apply import apply_expert_parallel, apply_expert_sharding, expert_parameters
from hetmesh.parallel.experts.block import ExpertBlock
from hetmesh.parallel.experts.layers import ExpertLayers
from hetmesh.parallel.experts.placement import move_experts
from hetmesh.parallel.experts.tokens import LaneSamples, RoutedTokens

__all__ = [
    "ExpertBlock",
    "ExpertLayers",
    "LaneSamples",
    "RoutedTokens",
    "apply_expert_parallel",
    "apply_expert_sharding",
    "expert_parameters",
    "move_experts",
]
