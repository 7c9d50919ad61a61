"""Qwen3-VL's vision tower (transformers' Qwen3VLVisionModel): images of any size, four patches to a row, DeepStack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.attention.in_transformers import WHOLE, use_in
from hetmesh.attention.packed_rows import attention_of
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta
from hetmesh.layout import Intervals
from hetmesh.models.adapter import Abilities, AdapterDefaults, AdapterRequest, SampleLike
from hetmesh.models.collate import media_items
from hetmesh.models.config_keys import hf, positive_int, transformers_config
from hetmesh.models.named.encoder import check_encoder
from hetmesh.models.weights.pretrained import Names, prefixes

SIZES = [
    "hidden_size",
    "intermediate_size",
    "depth",
    "num_heads",
    "in_channels",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "out_hidden_size",
    "num_position_embeddings",
]
TENSOR_PARALLEL_PLAN: Mapping[str, str] = MappingProxyType(
    {
        f"{part}.{fc}": style
        for part in ("blocks.*.mlp", "merger", "deepstack_merger_list.*")
        for fc, style in (("linear_fc1", "colwise"), ("linear_fc2", "rowwise"))
    }
)
"""Attention is not split: queries, keys and values are one linear layer, whose output cannot be split by head."""


@dataclass(frozen=True)
class Qwen3VLVisionAdapter(AdapterDefaults):
    """Images `[channels, height, width]` of any sizes, both sides a multiple of `patch_size * spatial_merge_size`.
    `merger` makes one row of `spatial_merge_size**2` patches, and one of each DeepStack feature. The patches of all
    images lie in one sequence, in which each attends to its own image only."""

    config: Any
    media: str
    in_features: None = None
    checkpoint_names: ClassVar[tuple[Names, ...]] = prefixes("", "visual.", "model.visual.")
    checkpoint_unused: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def make(cls, request: AdapterRequest) -> Qwen3VLVisionAdapter | None:
        """The adapter of a recipe's module. Keys not given follow the others: `in_channels` is the data source's,
        `out_hidden_size` the LLM's width, `intermediate_size` 4 x `hidden_size`; others are transformers'."""
        media = check_encoder(request, "qwen3_vl_vision")
        derived: dict[str, Any] = {}
        if request.media_shape is not None and len(request.media_shape) == 3:
            derived["in_channels"] = request.media_shape[0]
        if "hidden_size" in request.config:
            derived["intermediate_size"] = 4 * positive_int(request, "hidden_size", request.config["hidden_size"])
        if request.pretrained is None and "out_hidden_size" not in request.config:
            if request.out_features is None:
                return None
            derived["out_hidden_size"] = request.out_features
        types = ("qwen3_vl_vision", "qwen3_vl")  # the first releases called both parts qwen3_vl
        config = transformers_config(request, hf("Qwen3VLVisionConfig"), derived, types=types)
        for key in SIZES:
            positive_int(request, key, getattr(config, key))
        _check(request, config)
        return cls(config, media)

    @property
    def out_features(self) -> int:
        return self.config.out_hidden_size

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            token_sharded=("blocks",),
            token_gathered=("blocks.*.attn",),
            use_packed=self.use_packed,
            tokens_per_row=self.tokens_per_row,
            on_rows=(*self._mergers, "merger"),
            attention_copies=3,  # turned queries, turned keys (the projection makes all three), outputs of each image
            share=self.share,
            side_outputs=self.side_outputs,
            item_grid=self.item_grid,
        )

    @property
    def side_outputs(self) -> tuple[str, ...]:
        return tuple(f"deepstack.{i}" for i in range(len(self.config.deepstack_visual_indexes)))

    @property
    def patch_features(self) -> int:
        """Numbers of one patch: an image stands for `temporal_patch_size` equal frames."""
        return self.config.in_channels * self.config.temporal_patch_size * self.config.patch_size**2

    def build(self) -> nn.Module:
        return hf("Qwen3VLVisionModel")(self.config)

    def layers(self) -> tuple[str, ...]:
        blocks = (f"blocks.{i}" for i in range(self.config.depth))
        return ("patch_embed", "pos_embed", *blocks, *self._mergers, "merger")

    @property
    def _mergers(self) -> tuple[str, ...]:
        return tuple(f"deepstack_merger_list.{i}" for i in range(len(self.side_outputs)))

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        features = self.config.deepstack_visual_indexes
        return {name: style for name, style in TENSOR_PARALLEL_PLAN.items() if features or "deepstack" not in name}

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {key: getattr(self.config, key) for key in ("intermediate_size", "hidden_size")}

    @property
    def tokens_per_row(self) -> int:
        """Patches per row; ranks along `cp` share the patches of a lane."""
        return self.config.spatial_merge_size**2

    def use_packed(self, module: nn.Module) -> None:
        """Let `module` take patches shared between ranks: its attention becomes hetmesh's own."""
        use_in(module, self.config, WHOLE)

    def share(self, batch: Mapping[str, Any], kept: Intervals) -> dict[str, Any]:
        """The part of a batch of `collate` that belongs to the patches `kept`, in their order."""
        mine = torch.cat([torch.arange(a, b) for a, b in kept]) if kept else torch.zeros(0, dtype=torch.int64)
        if not len(mine):
            return {"patches": batch["patches"][:0], **self._places([(1, 1, 1)])}
        of_patches = ("patches", "interp_indices", "interp_weights", "position_ids")
        return {key: value[mine] if key in of_patches else value for key, value in batch.items()}

    def item_grid(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """The rows of an image as a grid: 1 frame, height, width."""
        step = self.config.patch_size * self.config.spatial_merge_size
        if len(shape) != 3 or shape[0] != self.config.in_channels or any(n < 1 or n % step for n in shape[1:]):
            raise SampleError(
                f"qwen3_vl_vision reads {self.media!r} of shape ({self.config.in_channels}, height, width) whose sides "
                f"are multiples of patch_size x spatial_merge_size = {step}, got {tuple(shape)}"
            )
        return 1, shape[1] // step, shape[2] // step

    def item_rows(self, shape: tuple[int, ...]) -> int:
        _, height, width = self.item_grid(shape)
        return height * width

    def collate(self, samples: Sequence[SampleLike], metas: Sequence[SampleMeta], **_: Any) -> dict[str, Any]:
        items = media_items(samples, metas, self.media)
        grids = [self.item_grid(tuple(item.shape)) for item in items]
        patch, merge, frames = (self.config.patch_size, self.config.spatial_merge_size, self.config.temporal_patch_size)
        patches = [_patches(item, patch, merge, frames) for item in items]
        return {
            "patches": torch.cat(patches) if patches else torch.zeros(0, self.patch_features),
            **self._places(grids or [(1, 1, 1)]),
        }

    def _places(self, grids: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        """What the tower would work out from the grids of its images: here it costs no synchronisation with a GPU. No
        tensor: where images begin and end, which each block needs as numbers."""
        from transformers import vision_utils

        merge = self.config.spatial_merge_size
        sizes = torch.tensor(grids) * torch.tensor([1, merge, merge])
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            sizes, int(self.config.num_position_embeddings**0.5), align_corners=True, spatial_merge_size=merge
        )
        return {
            "grid_thw": sizes,
            "interp_indices": indices,
            "interp_weights": weights,
            "position_ids": vision_utils.get_vision_position_ids(sizes, merge),
            "cu_seqlens": tuple(vision_utils.get_vision_cu_seqlens(sizes).tolist()),
        }

    def forward(
        self, module: nn.Module, batch: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        patches, places = batch["patches"], {k: v for k, v in batch.items() if k != "patches"}
        places["cu_seqlens"] = torch.tensor(places["cu_seqlens"], dtype=torch.int32)  # stays on the host
        rows = patches.shape[0] // self.tokens_per_row
        if rows == 0:  # one blank row that is dropped: every parameter takes part in every microbatch
            patches = torch.cat([patches, patches.new_zeros(self.tokens_per_row, self.patch_features)])
        extra = {} if (attention := attention_of(batch)) is None else {"attention_state": attention}
        out = module(patches, **places, **extra, return_dict=True)
        features = zip(self.side_outputs, out.deepstack_features or (), strict=True)
        return {"": out.pooler_output[:rows], **{name: feature[:rows] for name, feature in features}}


def _check(request: AdapterRequest, config: Any) -> None:
    key = f"{request.key}.config"
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 4:
        raise RecipeError(
            f"{key}.num_heads: must divide hidden_size = {config.hidden_size} into heads whose width is a multiple of "
            f"4 (rotary positions of two axes), got {config.num_heads}"
        )
    if int(config.num_position_embeddings**0.5) ** 2 != config.num_position_embeddings:
        raise RecipeError(
            f"{key}.num_position_embeddings: must be a square (of a grid's side), got {config.num_position_embeddings}"
        )
    indexes = list(config.deepstack_visual_indexes)
    if any(not 0 <= i < config.depth for i in indexes) or indexes != sorted(set(indexes)):
        raise RecipeError(
            f"{key}.deepstack_visual_indexes: must be ascending blocks of 0..{config.depth - 1}, got {indexes}"
        )


def _patches(image: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """`[channels, height, width]` -> `[patches, numbers of one]`, of `frames` equal frames each; those that become one
    row follow each other, as Qwen2-VL's processor cuts them."""
    channels, height, width = image.shape
    parts = image.reshape(channels, height // patch // merge, merge, patch, width // patch // merge, merge, patch)
    patches = parts.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels, 1, patch, patch)
    return patches.expand(-1, -1, frames, -1, -1).flatten(1)
