"""Images of any aspect ratio within a number of pixels, sides whole cells of patches, as Qwen2-VL has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetmesh.errors import RecipeError

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""`image_processor_type`s that resize so: those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

FARTHEST = 200
"""The largest ratio of an image's sides that these take."""


@dataclass(frozen=True)
class PixelBudget:
    """Sides that are multiples of `step` pixels, `least` to `most` pixels in all, in nearly the image's own ratio
    (transformers' `smart_resize`)."""

    step: int
    least: int
    most: int

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> PixelBudget | None:
        """What a preprocessor_config.json says; None for a processor of another kind.

        Raises:
            RecipeError: sizes are missing.
        """
        if config.get("image_processor_type") not in PROCESSORS:
            return None
        size = config.get("size") if isinstance(config.get("size"), Mapping) else {}
        assert isinstance(size, Mapping)
        least = config.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge")
        most = config.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge")
        numbers = (config.get("patch_size", 14), config.get("merge_size", 2), least, most)
        if not all(isinstance(n, int) and n > 0 for n in numbers):
            raise RecipeError(
                f"{where}: patch_size, merge_size and the least and most pixels (size = {{shortest_edge, longest_edge}}"
                f", or min_pixels and max_pixels) must be positive, got {list(numbers)}"
            )
        patch, merge, least, most = numbers
        return cls(patch * merge, int(least), int(most))  # type: ignore[arg-type]

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """`(height, width)` of the result.

        Raises:
            ValueError: an image that is too long.
        """
        if max(height, width) > FARTHEST * min(height, width):
            raise ValueError(f"its sides are {width} x {height}; one may be at most {FARTHEST} times the other")
        sides = [max(round(n / self.step), 1) * self.step for n in (height, width)]
        if round(height / self.step) * round(width / self.step) * self.step**2 > self.most:
            shrink = math.sqrt(height * width / self.most)
            sides = [max(math.floor(n / shrink / self.step), 1) * self.step for n in (height, width)]
        elif round(height / self.step) * round(width / self.step) * self.step**2 < self.least:
            grow = math.sqrt(self.least / (height * width))
            sides = [math.ceil(n * grow / self.step) * self.step for n in (height, width)]
        return sides[0], sides[1]
