"""The sizes of a config's vision tower, by the names that families have for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tower:
    """The sizes of the vision tower of a config; 0 where it has none."""

    patch: int
    side: int
    merge: int
    temporal: int
    has_class_token: bool
    parts: tuple[Any, ...]

    def read(self, key: str) -> Any:
        """Value of the key in the config, or else in its tower."""
        return next((value for part in self.parts if (value := vars(part).get(key)) is not None), None)


def at_path(config: Any, keys: Sequence[str], default: Any = None) -> Any:
    """`config.a.b` for ["a", "b"]."""
    for key in keys:
        config = getattr(config, key, None)
        if config is None:
            return default
    return config


def tower(config: Any) -> Tower:
    """Sizes of the vision tower."""
    config = getattr(config, "thinker_config", config)
    vision = getattr(config, "vision_config", None)
    parts = tuple(part for part in (config, vision) if part is not None)

    def number(*keys: str) -> int:
        for part in reversed(parts):
            for key in keys:
                value = vars(part).get(key)
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return 0

    return Tower(
        number("patch_size"),
        number("image_size"),
        number("spatial_merge_size", "merge_size", "merge_kernel_size"),
        number("temporal_patch_size", "patch_temporal"),
        getattr(vision, "model_type", "") in ("clip_vision_model",),
        parts,
    )


def rows_per_image(config: Any) -> int | None:
    """Rows of an image, or of a tile, that is as large as the tower takes."""
    vision = tower(config)
    if rows := vision.read("mm_tokens_per_image"):
        return int(rows)
    if not vision.patch or not vision.side:
        return None
    rows = (vision.side // vision.patch) ** 2
    if isinstance(ratio := vision.read("downsample_ratio"), float):
        return int(rows * ratio**2)
    if (factor := vision.read("scale_factor")) is not None:
        return rows // int(factor) ** 2
    return rows
