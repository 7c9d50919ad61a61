"""Qwen3 LLM (transformers' Qwen3ForCausalLM)."""

from __future__ import annotations

from typing import Any

from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.config_keys import hf, positive_int
from hetmesh.models.named.causal_lm import CausalLMAdapter


class Qwen3Adapter(CausalLMAdapter):
    """Qwen3: grouped-query attention with normalised queries and keys."""

    @classmethod
    def make(cls, request: AdapterRequest) -> CausalLMAdapter:
        """The adapter of a recipe's module. Keys not given are `derived_sizes`, the rest transformers' defaults."""
        return cls.make_from(request, hf("Qwen3Config"), hf("Qwen3ForCausalLM"), derived_sizes(request))


def derived_sizes(request: AdapterRequest) -> dict[str, Any]:
    """Sizes that follow from others where a recipe does not give them: `intermediate_size` is 3 x `hidden_size`,
    `head_dim` is `hidden_size / num_attention_heads`, `num_key_value_heads` is `num_attention_heads`."""
    sizes = {
        key: positive_int(request, key, request.config[key])
        for key in ("hidden_size", "num_attention_heads")
        if key in request.config
    }
    derived: dict[str, Any] = {}
    if "hidden_size" in sizes:
        derived["intermediate_size"] = 3 * sizes["hidden_size"]
    if "num_attention_heads" in sizes:
        derived["num_key_value_heads"] = sizes["num_attention_heads"]
    if len(sizes) == 2:
        derived["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    return derived
