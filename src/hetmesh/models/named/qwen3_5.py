"""Qwen3.5's LLMs (Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM): three layers of Gated DeltaNet to one of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hetmesh.attention.mixers import mixers, use_in_mixer
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Abilities, AdapterRequest
from hetmesh.models.config_keys import hf
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.qwen3 import derived_sizes
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter, expert_sizes
from hetmesh.models.named.qwen3_vl_text import MROPE, Qwen3VLTextAdapter
from hetmesh.parallel.linear import OwnRows
from hetmesh.parallel.tensor_parallel import GRAD_ALLREDUCE

LINEAR_KEY_HEADS, LEAVING = "linear_num_key_heads", ("out_proj", "o_proj")
MIXER, KINDS = "model.layers.*.linear_attn", ("linear_attention", "full_attention")


class Qwen3_5TextAdapter(Qwen3VLTextAdapter):
    """Layers of Gated DeltaNet and of attention, as `layer_types` says; rotary positions of three axes, in a quarter of
    the features of a head."""

    @classmethod
    def make(cls, request: AdapterRequest) -> CausalLMAdapter:
        """The adapter of a recipe's module; keys not given follow the others as those of `qwen3`, every fourth layer is
        of attention."""
        return cls.make_hybrid(request, hf("Qwen3_5TextConfig"), hf("Qwen3_5ForCausalLM"), derived_sizes(request))

    @classmethod
    def make_hybrid(
        cls, request: AdapterRequest, config_class: Any, model_class: Any, derived: dict[str, Any]
    ) -> CausalLMAdapter:
        """`make_vl`; raises RecipeError also for layers of other kinds, and of one kind alone."""
        adapter = cls.make_vl(request, config_class, model_class, derived)
        kinds, count = adapter.config.layer_types, adapter.config.num_hidden_layers
        if len(kinds) != count or {*kinds} != {*KINDS}:
            raise RecipeError(
                f"{request.key}.config.layer_types: {KINDS[0]!r} or {KINDS[1]!r} for each of num_hidden_layers = "
                f"{count}, and both, got {kinds}"
            )
        return adapter

    @classmethod
    def rope_parameters(cls, head_dim: int) -> dict[str, Any]:
        """A quarter of a head is rotated; as in the released models time, height and width have 11, 11 and 10
        frequencies of a head of 256."""
        half = head_dim // 8
        sections = [(half + 2) // 3, (half + 1) // 3, half // 3]
        return {**MROPE, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": sections}

    @property
    def abilities(self) -> Abilities:
        why = f"its layers of kind [{KINDS[0]!r}] know no other order than that of the tokens"
        return replace(super().abilities, layer_of_output=None, reasons={"attention_mask": why})

    def use_packed(self, module: nn.Module) -> None:
        super().use_packed(module)
        for layer in self.decoder_of(module).layers:
            for mixer in mixers(layer):
                use_in_mixer(mixer, padded=False)

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """transformers' own, but for layers of Gated DeltaNet, which it computes whole on every rank."""
        plan = {name: style for name, style in self.config.base_model_tp_plan.items() if "linear_attn" not in name}
        return {**self.plan_from(plan), **self._by_heads}

    @cached_property
    def _by_heads(self) -> Mapping[str, Any]:
        number = str(self.config.layer_types.index(KINDS[0]))
        with torch.device("meta"):
            return delta_net_by_heads(MIXER, self.model_class(self.config).get_submodule(MIXER.replace("*", number)))

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        sizes = super().tensor_parallel_sizes()
        return {**sizes, LINEAR_KEY_HEADS: self.config.linear_num_key_heads}


class Qwen3_5MoeTextAdapter(Qwen3MoeAdapter, Qwen3_5TextAdapter):
    """The same with experts in every layer, which ranks along `ep` share, beside one that every token goes through."""

    @classmethod
    def make(cls, request: AdapterRequest) -> Qwen3MoeAdapter:
        """The adapter of a recipe's module; keys not given follow the others as those of `qwen3_moe`, and
        `shared_expert_intermediate_size` is `moe_intermediate_size`."""
        derived = expert_sizes(request)
        derived.pop("intermediate_size", None)
        if (inner := request.config.get("moe_intermediate_size", derived.get("moe_intermediate_size"))) is not None:
            derived["shared_expert_intermediate_size"] = inner
        adapter = cls.make_hybrid(request, hf("Qwen3_5MoeTextConfig"), hf("Qwen3_5MoeForCausalLM"), derived)
        return cls.with_experts(request, adapter)


def delta_net_by_heads(holder: str, mixer: Any) -> dict[str, Any]:
    """The styles of a Gated DeltaNet, in modules that match `holder`, which gives each rank some key heads with the
    value heads that they serve; nothing for a mixer of another build. Fused queries, keys and values, and the
    convolution behind them, are three segments; where each row is of a key head, chunks are shares."""
    sizes = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
    if not all(isinstance(getattr(mixer, size, None), int) for size in (*sizes, "head_v_dim")):
        return {}
    heads, fused = (mixer.num_v_heads,), (mixer.key_dim, mixer.key_dim, mixer.value_dim)
    if any(p.shape != heads for p in mixer.parameters(recurse=False)):
        return {}
    rows: dict[str, tuple[int, ...]] = {name: heads for name, _ in mixer.named_parameters(recurse=False)}
    found: dict[str, Any] = {}
    for name, part in mixer.named_children():
        own = [len(p) for p in part.parameters()]
        plain = type(part) is nn.Linear and part.bias is None
        if plain and name in LEAVING and part.in_features == mixer.value_dim:
            found[f"{holder}.{name}"] = "rowwise"
        elif plain and own == [sum(fused)]:
            found[f"{holder}.{name}"] = OwnRows({"weight": fused})
        elif plain and part.out_features % mixer.num_k_heads == 0:
            found[f"{holder}.{name}"] = "colwise"
        elif type(part) is nn.Conv1d and own == [sum(fused)]:
            rows[f"{name}.weight"] = fused
        elif own == [mixer.head_v_dim]:
            found[f"{holder}.{name}"] = GRAD_ALLREDUCE
        elif own:
            return {}
    return found | {holder: OwnRows(rows, sizes)} if "rowwise" in found.values() else {}
