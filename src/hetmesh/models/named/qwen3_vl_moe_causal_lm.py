"""transformers' Qwen3VLMoeTextModel with a head; in a file of its own because importing its base classes takes
seconds."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoePreTrainedModel, Qwen3VLMoeTextModel


class Qwen3VLMoeTextForCausalLM(Qwen3VLMoePreTrainedModel):
    """The text half of `Qwen3VLMoeForConditionalGeneration`: `model` and `lm_head`; transformers has no class for
    it."""

    config_class = Qwen3VLMoeTextConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen3VLMoeTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
