"""What encoders of transformers share: media items of one shape in, rows `[n * rows_per_item, hidden size]` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.module_graph import Activation
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import Abilities, AdapterDefaults, AdapterRequest, SampleLike
from hetmesh.models.collate import collate_media
from hetmesh.models.config_keys import positive_int
from hetmesh.models.weights.pretrained import Names, prefixes
from hetmesh.parallel.stage_views import PREVIOUS

IMAGE_TOWER_PLAN: Mapping[str, Any] = MappingProxyType(
    {f"encoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    | {"encoder.layers.*.self_attn.out_proj": "rowwise"}
    | {"encoder.layers.*.mlp.fc1": "colwise", "encoder.layers.*.mlp.fc2": "rowwise"}
)
"""The tensor parallel plan of SigLIP's and CLIP's towers, which share their names."""

IMAGE_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
IMAGE_DIVISORS = MappingProxyType({"hidden_size": "num_attention_heads"})


@dataclass(frozen=True)
class EncoderAdapter(AdapterDefaults):
    """Base of the adapters of encoders whose media items all have one shape."""

    config: Any
    media: str
    in_features: None = None
    checkpoint_names: ClassVar[tuple[Names, ...]] = prefixes("")
    token_sharded: ClassVar[tuple[str, ...]] = ()
    first_layers: ClassVar[tuple[str, ...]] = ()
    """Layers that exchange other activations than blocks do, so that they share a pipeline stage."""

    @property
    def checkpoint_unused(self) -> tuple[str, ...]:
        return ()

    @property
    def out_features(self) -> int:
        return self.config.hidden_size

    @property
    def media_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def rows_per_item(self) -> int:
        raise NotImplementedError

    @property
    def activation(self) -> Activation:
        """What passes between its blocks."""
        return Activation(self.out_features)

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            activation=self.activation,
            first_layers=self.first_layers,
            token_sharded=self.token_sharded,
            attention_dropout=self.config.attention_dropout or 0.0,
        )

    def encode(self, module: nn.Module, media: Tensor) -> Tensor:
        """Items `[n, *media_shape]`, n > 0 -> features `[n, rows_per_item, out_features]`.

        In a pipeline stage input and output may be what passes between stages, `[n, rows, features]`.
        """
        raise NotImplementedError

    def item_rows(self, shape: tuple[int, ...]) -> int:
        if tuple(shape) != self.media_shape:
            raise SampleError(
                f"{type(self).__name__} is configured for {self.media!r} of shape {self.media_shape}, "
                f"got {tuple(shape)}"
            )
        return self.rows_per_item

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Tensor]:
        return collate_media(samples, metas, self.media, self.media_shape)

    def forward(self, module: nn.Module, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
        if PREVIOUS in inputs:
            passed = self.activation.per_row * self.rows_per_item + self.activation.per_item
            items = inputs[PREVIOUS].view(-1, passed, self.activation.features)
        else:
            items = batch["media"]
        n = items.shape[0]
        if n == 0:  # transformers cannot reshape empty tensors: use one blank item and drop its rows
            shape = (passed, self.activation.features) if PREVIOUS in inputs else self.media_shape
            items = torch.cat([items, items.new_zeros(1, *shape)])  # still a function of the input
        return self.encode(module, items)[:n].reshape(-1, self.out_features)


class ImageTowerAdapter(EncoderAdapter):
    """A vision transformer over square images of one size, one row per patch."""

    checkpoint_names: ClassVar = prefixes(
        "",
        *(
            f"{model}{tower}"
            for model in ("", "model.")
            for tower in ("vision_model.", "vision_tower.", "vision_tower.vision_model.")
        ),
    )

    @property
    def media_shape(self) -> tuple[int, ...]:
        """Shape of an image: `(channels, height, width)`."""
        return (self.config.num_channels, self.config.image_size, self.config.image_size)

    @property
    def rows_per_item(self) -> int:
        return (self.config.image_size // self.config.patch_size) ** 2

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        return IMAGE_TOWER_PLAN

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {"num_attention_heads": self.config.num_attention_heads}


def check_encoder(request: AdapterRequest, model: str) -> str:
    """The kind of media that the encoder reads; a RecipeError unless its place in the graph is an encoder's."""
    if request.placeholders or not request.consumers:
        raise RecipeError(
            f"{request.key}: {model} reads media and emits rows, so it needs a boundary out of it and none into it"
        )
    if request.media is None:
        raise RecipeError(
            f"{request.key}: {model} reads media, and {request.name!r} is in the place of the LLM, as hidden states "
            "leave it by an `at`: does the boundary out of the LLM lack its `at`?"
        )
    return request.media


def derived_image_keys(request: AdapterRequest) -> dict[str, Any]:
    """Image tower keys that follow from others: `num_channels` and `image_size` are those of the data source's images,
    `intermediate_size` is 4 x `hidden_size`."""
    derived: dict[str, Any] = {}
    if request.media_shape is not None and len(request.media_shape) == 3:
        derived["num_channels"], derived["image_size"], _ = request.media_shape
    if "hidden_size" in request.config:
        derived["intermediate_size"] = 4 * positive_int(request, "hidden_size", request.config["hidden_size"])
    return derived


def check_sizes(
    request: AdapterRequest,
    config: Any,
    sizes: Sequence[str] = IMAGE_SIZES,
    divisors: Mapping[str, str] = IMAGE_DIVISORS,
) -> None:
    """Raise RecipeError unless `sizes` are positive integers and each key of `divisors` is a multiple of its value."""
    for key in sizes:
        positive_int(request, key, getattr(config, key))
    for key, divisor in divisors.items():
        if getattr(config, key) % getattr(config, divisor):
            raise RecipeError(
                f"{request.key}.config.{divisor}: must divide {key} = {getattr(config, key)}, "
                f"got {getattr(config, divisor)}"
            )
    # image_size need not be a multiple of patch_size: as in transformers, the remainder at the right and lower edge is
    # not read (SigLIP so400m has patches of 14 in images of 384).
    if "patch_size" in sizes and config.patch_size > config.image_size:
        raise RecipeError(
            f"{request.key}.config.patch_size: must be at most image_size = {config.image_size}, "
            f"got {config.patch_size}"
        )
