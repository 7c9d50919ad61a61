"""transformers' Qwen3VLTextModel with a head; in a file of its own because importing its base classes takes seconds."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel, Qwen3VLTextModel


class Qwen3VLTextForCausalLM(Qwen3VLPreTrainedModel):
    """The text half of `Qwen3VLForConditionalGeneration`: `model` and `lm_head`; transformers has no class for it."""

    config_class = Qwen3VLTextConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
