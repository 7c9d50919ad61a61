"""SigLIP vision tower (transformers' SiglipVisionModel without its pooling head): images -> patch rows."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.config_keys import hf, transformers_config
from hetmesh.models.named.encoder import ImageTowerAdapter, check_encoder, check_sizes, derived_image_keys


class SiglipAdapter(ImageTowerAdapter):
    """SigLIP over square images of one size; one row per patch. `vision_use_head` is off in its config."""

    token_sharded: ClassVar = ("encoder.layers", "post_layernorm")

    @property
    def checkpoint_unused(self) -> tuple[str, ...]:
        return (r"head\..*", r"embeddings\.position_ids")

    @classmethod
    def make(cls, request: AdapterRequest) -> SiglipAdapter:
        """The adapter of a recipe's module. Keys not given are `derived_image_keys`, others transformers' defaults."""
        media = check_encoder(request, "siglip")
        config = transformers_config(
            request,
            hf("SiglipVisionConfig"),
            derived_image_keys(request),
            types=("siglip_vision_model",),
            forced={"vision_use_head": False},
        )
        if request.config.get("vision_use_head"):
            raise RecipeError(f"{request.key}.config.vision_use_head: rows are patch features, without a pooling head")
        check_sizes(request, config)
        return cls(config, media)

    def build(self) -> nn.Module:
        return hf("SiglipVisionModel")(self.config)

    def layers(self) -> tuple[str, ...]:
        blocks = (f"encoder.layers.{i}" for i in range(self.config.num_hidden_layers))
        return ("embeddings", *blocks, "post_layernorm")

    def encode(self, module: nn.Module, media: Tensor) -> Tensor:
        return module(pixel_values=media).last_hidden_state
