"""Llama LLM (transformers' LlamaForCausalLM): Llama 2 and 3, Vicuna and other models of this architecture."""

from __future__ import annotations

from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.config_keys import hf
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.qwen3 import derived_sizes


class LlamaAdapter(CausalLMAdapter):
    """Llama: grouped-query attention, gated MLP."""

    @classmethod
    def make(cls, request: AdapterRequest) -> CausalLMAdapter:
        """The adapter of a recipe's module. Keys not given are `derived_sizes`, the rest transformers' defaults."""
        return cls.make_from(request, hf("LlamaConfig"), hf("LlamaForCausalLM"), derived_sizes(request))
