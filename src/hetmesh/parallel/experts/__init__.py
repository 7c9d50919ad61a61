"""Mixture-of-experts blocks whose experts lie on an `ep` axis: tokens go to their experts, and their sums come back."""

from hetmesh.parallel.experts.block import ExpertBlock, ExpertLayers
from hetmesh.parallel.experts.placement import move_experts
from hetmesh.parallel.experts.routed_tokens import LaneSamples, RoutedTokens
from hetmesh.parallel.experts.shard_experts import apply_expert_parallel, apply_expert_sharding
