"""Qwen3-VL-MoE's LLM (transformers' Qwen3VLMoeTextModel with a head): Qwen3-VL's, with experts as Qwen3-MoE's."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.lazy_transformers import hf
from hetmesh.models.named.qwen3_moe import Qwen3MoeAdapter, expert_sizes
from hetmesh.models.named.qwen3_vl_text import Qwen3VLTextAdapter
from hetmesh.models.weights.model_forms import class_forms
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import StoredForm


class Qwen3VLMoeTextAdapter(Qwen3MoeAdapter, Qwen3VLTextAdapter):
    """Positions of three axes and DeepStack features, and mixture-of-experts blocks, which ranks along `ep` share."""

    @classmethod
    def make(cls, request: AdapterRequest) -> Qwen3MoeAdapter:
        """The adapter of a recipe's module; keys not given follow the others as those of `qwen3_moe` and
        `qwen3_vl_text`. Routing weights of a token always add up to 1 (there is no `norm_topk_prob`)."""
        from hetmesh.models.named.qwen3_vl_causal_lm import Qwen3VLMoeTextForCausalLM

        adapter = cls.make_vl(request, hf("Qwen3VLMoeTextConfig"), Qwen3VLMoeTextForCausalLM, expert_sizes(request))
        return cls.with_experts(request, adapter)

    def read_forms(self, pretrained: Pretrained) -> Mapping[str, StoredForm]:
        """Experts' matrices are transposed in the released checkpoints, but not in those that `save_pretrained` wrote;
        they are told apart by their shapes."""
        count, inner, features = self.config.num_experts, self.config.moe_intermediate_size, self.config.hidden_size
        shapes = {
            "mlp.experts.gate_up_proj": (count, 2 * inner, features),
            "mlp.experts.down_proj": (count, features, inner),
        }
        return class_forms(self.model_class, SimpleNamespace(model_type="qwen3_vl_moe"), pretrained, shapes)
