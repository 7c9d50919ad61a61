"""SigLIP vision tower (transformers' SiglipVisionModel without its pooling head): images -> patch rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import AdapterRequest, SampleLike
from hetmesh.models.collate import collate_media
from hetmesh.models.config_keys import positive_int, transformers_config

TENSOR_PARALLEL_PLAN: Mapping[str, str] = MappingProxyType(
    {
        "encoder.layers.*.self_attn.q_proj": "colwise",
        "encoder.layers.*.self_attn.k_proj": "colwise",
        "encoder.layers.*.self_attn.v_proj": "colwise",
        "encoder.layers.*.self_attn.out_proj": "rowwise",
        "encoder.layers.*.mlp.fc1": "colwise",
        "encoder.layers.*.mlp.fc2": "rowwise",
    }
)


@dataclass(frozen=True)
class SiglipAdapter:
    """SigLIP over square images of one size; one row per patch.

    Attributes:
        config: a transformers SiglipVisionConfig with `vision_use_head` off.
        media: the kind of media it reads.
    """

    config: Any
    media: str
    in_features: None = None

    @classmethod
    def make(cls, request: AdapterRequest) -> SiglipAdapter:
        """The adapter of a recipe's module.

        Keys not given follow the others: `num_channels` and `image_size` are those of the data source's images,
        `intermediate_size` is 4 x `hidden_size`; the rest are transformers' defaults.

        Raises:
            RecipeError: unknown keys, sizes that do not fit each other, or a place in the graph it cannot have.
        """
        from transformers.models.siglip.configuration_siglip import SiglipVisionConfig

        if request.placeholders or not request.consumers:
            raise RecipeError(
                f"{request.key}: siglip reads media and emits rows, so it needs a boundary out of it and none into it"
            )
        if request.media is None:
            raise RecipeError(f"{request.key}.media: which kind of media does it read? Give e.g. media = 'image'")
        derived: dict[str, Any] = {}
        if request.media_shape is not None and len(request.media_shape) == 3:
            derived["num_channels"], derived["image_size"], _ = request.media_shape
        if "hidden_size" in request.config:
            hidden = positive_int(request, "hidden_size", request.config["hidden_size"])
            derived["intermediate_size"] = 4 * hidden
        config = transformers_config(request, SiglipVisionConfig, {**derived, "vision_use_head": False})
        if config.vision_use_head:
            raise RecipeError(f"{request.key}.config.vision_use_head: rows are patch features, without a pooling head")
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size"):
            positive_int(request, key, getattr(config, key))
        for key, divisor in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
            if getattr(config, key) % getattr(config, divisor):
                raise RecipeError(
                    f"{request.key}.config.{divisor}: must divide {key} = {getattr(config, key)}, "
                    f"got {getattr(config, divisor)}"
                )
        return cls(config, request.media)

    @property
    def out_features(self) -> int:
        return self.config.hidden_size

    @property
    def media_shape(self) -> tuple[int, int, int]:
        """Shape of an image: `(channels, height, width)`."""
        return (self.config.num_channels, self.config.image_size, self.config.image_size)

    def build(self) -> nn.Module:
        from transformers.models.siglip.modeling_siglip import SiglipVisionModel

        return SiglipVisionModel(self.config)

    def layers(self) -> tuple[str, ...]:
        blocks = (f"encoder.layers.{i}" for i in range(self.config.num_hidden_layers))
        return ("embeddings", *blocks, "post_layernorm")

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return TENSOR_PARALLEL_PLAN

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {"num_attention_heads": self.config.num_attention_heads}

    def item_rows(self, shape: tuple[int, ...]) -> int:
        if tuple(shape) != self.media_shape:
            raise SampleError(f"siglip is configured for {self.media_shape} {self.media!r}, got {tuple(shape)}")
        return (self.config.image_size // self.config.patch_size) ** 2

    def rows(self, incoming: int) -> int:
        return incoming

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        return collate_media(samples, metas, self.media, self.media_shape)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        media = batch["media"]
        n = media.shape[0]
        if n == 0:  # its views are ambiguous on empty tensors: one blank image whose rows are dropped
            media = torch.zeros(1, *self.media_shape, device=media.device)
        features = module(pixel_values=media).last_hidden_state
        return features[:n].reshape(-1, self.out_features)
