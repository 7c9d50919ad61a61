"""transformers' text models of Qwen3-VL with a head, apart because importing their base classes takes seconds."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel, Qwen3VLTextModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoePreTrainedModel, Qwen3VLMoeTextModel


class _WithHead:
    """`model` and `lm_head`: the text half of a `...ForConditionalGeneration`, for which transformers has no class."""

    text_model: Any
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]


class Qwen3VLTextForCausalLM(_WithHead, Qwen3VLPreTrainedModel):
    """The text half of Qwen3-VL."""

    config_class = Qwen3VLTextConfig
    text_model = Qwen3VLTextModel


class Qwen3VLMoeTextForCausalLM(_WithHead, Qwen3VLMoePreTrainedModel):
    """The text half of Qwen3-VL-MoE."""

    config_class = Qwen3VLMoeTextConfig
    text_model = Qwen3VLMoeTextModel
