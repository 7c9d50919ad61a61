"""How recordings are handed to a model's audio tower: log-mel features `[mel bins, frames]`, one value per way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hetmesh.errors import SampleError
from hetmesh.models.config_keys import hf
from hetmesh.models.split.item_calls import ItemCall, required_arguments
from hetmesh.models.split.whole_model import features_of

FEW_FRAMES = 7
"""Frames of a short recording, of which towers that make a row of four make two rows."""


@dataclass(frozen=True)
class Frames(ItemCall):
    """Recordings of any length, padded to the longest of a call, with a mask of their frames."""

    mel: int

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.mel, FEW_FRAMES), (self.mel, 4 * FEW_FRAMES + 1)

    def units(self, shape: tuple[int, ...]) -> int:
        """One for two of the frames that a convolution of stride 2 leaves."""
        return ((shape[-1] - 1) // 2 + 1 - 2) // 2 + 1

    def check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[0] != self.mel or self.units(shape) < 1:
            raise SampleError(f"recordings must be of shape ({self.mel}, frames), 3 frames at least, got {shape}")

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        lengths = [item.shape[1] for item in items]
        media = items[0].new_zeros(len(items), self.mel, max(lengths))
        for row, item in zip(media, items, strict=True):
            row[:, : item.shape[1]] = item
        return {"media": media, "mask": _mask(lengths, max(lengths))}

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"input_features": batch["media"], "feature_attention_mask": batch["mask"]}


@dataclass(frozen=True)
class PaddedFrames(Frames):
    """Recordings padded to `frames` as the feature extractor does it, whose size says how many frames they had: the
    tower's convolutions see some of the silence that follows."""

    frames: int

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.mel, self.frames, min(FEW_FRAMES, self.frames)), (self.mel, self.frames, self.frames)

    def check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or shape[:2] != (self.mel, self.frames) or not 3 <= shape[2] <= self.frames:
            raise SampleError(
                f"recordings must be of shape ({self.mel}, {self.frames}), padded to that by the feature extractor, "
                f"with 3 to {self.frames} frames before that as their size (MediaItem.size), got {shape}"
            )

    def size_dims(self, shape: tuple[int, ...]) -> int:
        return 1

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        return {"media": torch.stack(list(items)), "mask": _mask([n for (n,) in sizes], self.frames)}


@dataclass(frozen=True)
class AllFrames(Frames):
    """Recordings padded to `frames` by the feature extractor, all of which become rows (Whisper)."""

    frames: int

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.mel, self.frames), (self.mel, self.frames)

    def units(self, shape: tuple[int, ...]) -> int:
        return 1

    def check(self, shape: tuple[int, ...]) -> None:
        if shape != (self.mel, self.frames):
            raise SampleError(f"recordings must be of shape ({self.mel}, {self.frames}), got {shape}")

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"input_features": batch["media"]}


def _mask(lengths: Sequence[int], longest: int) -> Tensor:
    return (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()


AUDIO_CALLS: Mapping[str, Callable[[Any], Frames]] = MappingProxyType(
    {
        "frames": lambda audio: Frames(audio.num_mel_bins),
        "all_frames": lambda audio: AllFrames(audio.num_mel_bins, 2 * audio.max_source_positions),
        "padded_frames": lambda audio: PaddedFrames(audio.num_mel_bins, 2 * audio.max_source_positions),
    }
)
"""Ways for recordings by name, made from the config of the tower."""


def audio_call(name: str | None, model: Any, config: Any) -> ItemCall:
    """How recordings are handed to `model`. `name`: a key of `AUDIO_CALLS`; None: as features and their mask, if that
    is what `get_audio_features` takes."""
    if name is None:
        parameters = inspect.signature(features_of(model, "audio")).parameters
        known = {"input_features", "feature_attention_mask"}
        if not known <= parameters.keys() or required_arguments(parameters) - known:
            raise LookupError(f"its get_audio_features takes {sorted(parameters)}, not {sorted(known)} alone")
    return AUDIO_CALLS[name or "frames"](getattr(config, "audio_config", config))


def features_of_padded(model: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """The rows `[n, features]` of recordings, of a model without `get_audio_features`: tower and projector, and masks
    of both as its forward has them (transformers' `Qwen2AudioModel.forward`)."""
    tower = model.get_encoder("audio")
    lengths, rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    inside = torch.arange(tower.config.max_source_positions, device=lengths.device) < lengths[:, None]
    mask = hf("masking_utils.create_bidirectional_mask")(
        config=tower.config, inputs_embeds=input_features.new_zeros(*inside.shape, 1), attention_mask=inside.long()
    )
    hidden = tower(input_features, attention_mask=mask).last_hidden_state
    projected = model.base_model.multi_modal_projector(hidden)
    return projected[torch.arange(projected.shape[1], device=rows.device) < rows[:, None]]
