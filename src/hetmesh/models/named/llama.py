"""Llama LLM (transformers' LlamaForCausalLM): Llama 2 and 3, Vicuna and other models of this architecture."""

from __future__ import annotations

from typing import Any

from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.config_keys import hf, positive_int
from hetmesh.models.named.causal_lm import CausalLMAdapter


class LlamaAdapter(CausalLMAdapter):
    """Llama: grouped-query attention, gated MLP."""

    @classmethod
    def make(cls, request: AdapterRequest) -> CausalLMAdapter:
        """The adapter of a recipe's module. `num_key_value_heads` is `num_attention_heads` and `intermediate_size` 3 x
        `hidden_size` unless given; the rest are transformers' defaults."""
        derived: dict[str, Any] = {}
        if "hidden_size" in request.config:
            derived["intermediate_size"] = 3 * positive_int(request, "hidden_size", request.config["hidden_size"])
        return cls.make_from(request, hf("LlamaConfig"), hf("LlamaForCausalLM"), derived)
