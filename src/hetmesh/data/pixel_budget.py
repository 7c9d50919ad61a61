"""Images of any aspect ratio within a number of pixels, sides whole cells of patches: Qwen2-VL's and GLM-4V's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetmesh.errors import RecipeError

QWEN = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""`image_processor_type`s that resize so: those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

GLM = tuple(f"{name}ImageProcessor{back}" for name in ("Glm4v", "Glm46V") for back in ("", "Fast", "Pil"))
"""Those of GLM-4.1V to 4.6V."""

FARTHEST = 200
"""The largest ratio of an image's sides that these take."""


@dataclass(frozen=True)
class PixelBudget:
    """Sides that are multiples of `step` pixels, `least` to `most` pixels in all, in nearly the image's own ratio
    (transformers' `smart_resize`).

    Attributes:
        frames: how many times the pixels of an image count.
        grows: images with a side below `step` are first enlarged until they have none.
    """

    step: int
    least: int
    most: int
    frames: int = 1
    grows: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> PixelBudget | None:
        """What a preprocessor_config.json says; None for a processor of another kind.

        Raises:
            RecipeError: sizes are missing.
        """
        kind = config.get("image_processor_type")
        if kind not in (*QWEN, *GLM):
            return None
        size = config.get("size") if isinstance(config.get("size"), Mapping) else {}
        assert isinstance(size, Mapping)
        least, most = size.get("shortest_edge"), size.get("longest_edge")
        if kind in QWEN:
            least = config.get("min_pixels") or size.get("min_pixels") or least
            most = config.get("max_pixels") or size.get("max_pixels") or most
        frames = config.get("temporal_patch_size", 2) if kind in GLM else 1
        numbers = (config.get("patch_size", 14), config.get("merge_size", 2), least, most, frames)
        if not all(isinstance(n, int) and n > 0 for n in numbers):
            raise RecipeError(
                f"{where}: patch_size, merge_size and the least and most pixels (size = {{shortest_edge, longest_edge}}"
                f", or Qwen's min_pixels and max_pixels) must be positive, got {list(numbers[:4])}"
            )
        patch, merge, least, most, frames = numbers
        return cls(patch * merge, int(least), int(most), frames, kind in GLM)  # type: ignore[arg-type]

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """`(height, width)` of the result.

        Raises:
            ValueError: an image that is too long.
        """
        if self.grows and min(height, width) < self.step:
            scale = max(self.step / height, self.step / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > FARTHEST * min(height, width):
            raise ValueError(f"its sides are {width} x {height}; one may be at most {FARTHEST} times the other")
        sides = [max(round(n / self.step), 1) * self.step for n in (height, width)]
        pixels = round(height / self.step) * round(width / self.step) * self.step**2 * self.frames
        if pixels > self.most:
            shrink = math.sqrt(self.frames * height * width / self.most)
            sides = [max(math.floor(n / shrink / self.step), 1) * self.step for n in (height, width)]
        elif pixels < self.least:
            grow = math.sqrt(self.least / (self.frames * height * width))
            sides = [math.ceil(n * grow / self.step) * self.step for n in (height, width)]
        return sides[0], sides[1]
