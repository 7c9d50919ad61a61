"""Qwen3-MoE LLM (transformers' Qwen3MoeForCausalLM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Abilities, AdapterRequest
from hetmesh.models.config_keys import positive_int
from hetmesh.models.lazy_transformers import hf
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.fused_experts import HALVES, balance_of, fused_layers, two_halves
from hetmesh.models.named.qwen3 import derived_sizes


@dataclass(frozen=True)
class Qwen3MoeAdapter(CausalLMAdapter):
    """Qwen3 with mixture-of-experts blocks, whose experts ranks along `ep` can share."""

    balance: float = 0.0
    in_two_dims: ClassVar = HALVES

    @classmethod
    def make(cls, request: AdapterRequest) -> Qwen3MoeAdapter:
        """The adapter of a recipe's module.

        Keys not given follow the others as Qwen3's do; `moe_intermediate_size` is `hidden_size`. The coefficient of the
        load-balancing loss is `router_aux_loss_coef`, 0 for none; that of a directory counts as `balance_of` says.
        """
        derived, given = expert_sizes(request), request.config.get("head_dim")
        if "head_dim" in request.config:  # which transformers reads, but does not declare
            derived["head_dim"] = positive_int(request, "head_dim", given)
            others = {key: value for key, value in request.config.items() if key != "head_dim"}
            request = replace(request, config=others)
        adapter: Any = cls.make_from(request, hf("Qwen3MoeConfig"), hf("Qwen3MoeForCausalLM"), derived)
        if given not in (None, own := adapter.config.head_dim):
            raise RecipeError(
                f"{request.key}.config.head_dim = {given!r}, but {request.pretrained} says {own!r} in its config.json; "
                "leave the key out"
            )
        return cls.with_experts(request, adapter)

    @classmethod
    def with_experts(cls, request: AdapterRequest, adapter: Any) -> Qwen3MoeAdapter:
        """`adapter` of a model with experts, with the weight of its load-balancing loss; raises RecipeError for numbers
        of experts that do not fit each other."""
        _check_experts(request, adapter.config)
        balanced: Qwen3MoeAdapter = replace(adapter, balance=balance_of(request, adapter.config))
        return balanced

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, experts=fused_layers(self.config, self.balance))

    def build(self) -> nn.Module:
        return two_halves(super().build())

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        plan = super().tensor_parallel_plan()
        experts = self.abilities.experts
        dense = experts is None or len(experts.blocks) < self.config.num_hidden_layers
        return {
            pattern: style
            for pattern, style in plan.items()
            if ".mlp.experts" not in pattern and (dense or ".mlp." not in pattern)
        }

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {**super().tensor_parallel_sizes(), "moe_intermediate_size": self.config.moe_intermediate_size}


def expert_sizes(request: AdapterRequest) -> dict[str, Any]:
    """Sizes that follow from others where a recipe does not give them."""
    derived = derived_sizes(request)
    if "hidden_size" in request.config:
        derived["moe_intermediate_size"] = request.config["hidden_size"]
    return derived


def _check_experts(request: AdapterRequest, config: Any) -> None:
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        positive_int(request, key, getattr(config, key))
    step, layers = config.decoder_sparse_step, config.num_hidden_layers
    if not 1 <= step <= layers:
        raise RecipeError(
            f"{request.key}.config.decoder_sparse_step = {step!r}: the interval between layers with experts; valid are "
            f"1 (all) to num_hidden_layers = {layers} (only the last)"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise RecipeError(
            f"{request.key}.config.num_experts_per_tok = {config.num_experts_per_tok}: a token cannot have more "
            f"experts than there are, num_experts = {config.num_experts}"
        )
    missing = sorted({*request.config.get("mlp_only_layers", ())} - {*range(config.num_hidden_layers)})
    if missing:
        raise RecipeError(
            f"{request.key}.config.mlp_only_layers: layers {missing} do not exist; valid are 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    if config.num_experts > MOST_EXPERTS:
        raise RecipeError(f"{request.key}.config.num_experts = {config.num_experts}: valid are 1 to {MOST_EXPERTS}")


MOST_EXPERTS = 2**15 - 1
"""A token's choices travel as 16-bit numbers."""
