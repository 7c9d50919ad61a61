"""CLIP vision tower (transformers' CLIPVisionModel): images -> patch rows, as LLaVA reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.config_keys import hf, transformers_config
from hetmesh.models.named.encoder import ImageTowerAdapter, check_encoder, check_sizes, derived_image_keys
from hetmesh.parallel.stage_views import is_absent


@dataclass(frozen=True)
class ClipAdapter(ImageTowerAdapter):
    """CLIP over square images of one size: the output of one of its blocks, without the pooler.

    Attributes:
        class_token: also emit the class token's row, before those of the patches.
        feature_layer: the block whose output is read, counted from the end: -1 is the last one, -2 the one before
            (LLaVA's choice). Later blocks are not built.
    """

    token_sharded: ClassVar = ("pre_layrnorm", "encoder.layers")
    class_token: bool = False
    feature_layer: int = -1

    @classmethod
    def make(cls, request: AdapterRequest) -> ClipAdapter:
        """The adapter of a recipe's module. Keys not given are `derived_image_keys`, the rest transformers' defaults;
        two are hetmesh's own: `class_token` (false) and `feature_layer` (-1)."""
        media = check_encoder(request, "clip")
        extra = {key: request.config[key] for key in ("class_token", "feature_layer") if key in request.config}
        request = replace(request, config={k: v for k, v in request.config.items() if k not in extra})
        config = transformers_config(
            request, hf("CLIPVisionConfig"), derived_image_keys(request), types=("clip_vision_model",)
        )
        check_sizes(request, config)
        adapter = cls(config, media, **extra)
        if not isinstance(adapter.class_token, bool):
            raise RecipeError(f"{request.key}.config.class_token: must be true or false, got {adapter.class_token!r}")
        blocks = config.num_hidden_layers
        if type(adapter.feature_layer) is not int or not -blocks <= adapter.feature_layer <= -1:
            raise RecipeError(
                f"{request.key}.config.feature_layer: must be in {-blocks}..-1 (-1 is the last of {blocks} blocks), "
                f"got {adapter.feature_layer!r}"
            )
        return adapter

    @property
    def rows_per_item(self) -> int:
        return (self.config.image_size // self.config.patch_size) ** 2 + self.class_token

    @property
    def _blocks(self) -> int:
        return self.config.num_hidden_layers + self.feature_layer + 1

    @property
    def checkpoint_unused(self) -> tuple[str, ...]:
        later = (rf"encoder\.layers\.{i}\..*" for i in range(self._blocks, self.config.num_hidden_layers))
        return (r"post_layernorm\..*", r"embeddings\.position_ids", *later)

    def build(self) -> nn.Module:
        config = type(self.config).from_dict({**self.config.to_dict(), "num_hidden_layers": self._blocks})
        config._attn_implementation = "sdpa"
        module: Any = hf("CLIPVisionModel")(config)
        module.post_layernorm = nn.Identity()  # only the pooler reads it: it would never get a gradient
        return module

    def layers(self) -> tuple[str, ...]:
        return ("embeddings", "pre_layrnorm", *(f"encoder.layers.{i}" for i in range(self._blocks)))

    @property
    def activation(self) -> Activation:
        return Activation(self.out_features, per_item=0 if self.class_token else 1)

    def encode(self, module: nn.Module, media: Tensor) -> Tensor:
        features = module(pixel_values=media).last_hidden_state
        whole = self.class_token or is_absent(module.get_submodule(self.layers()[-1]))
        return features if whole else features[:, 1:]
