"""Sizes that processors of transformers give images: cut into tiles of one size, as many as suit an image's own size,
or within a number of pixels, sides whole cells of patches (Qwen2-VL's and GLM-4V's)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetmesh.errors import RecipeError

if TYPE_CHECKING:
    from PIL.Image import Image

ANY_RESOLUTION = tuple(f"LlavaOnevisionImageProcessor{back}" for back in ("", "Fast", "Pil"))
CROPS = tuple(f"GotOcr2ImageProcessor{back}" for back in ("", "Fast", "Pil"))
"""`image_processor_type`s of both ways; the second is InternVL's."""

SPLITS = tuple(f"{name}ImageProcessor{back}" for name in ("Idefics3", "SmolVLM") for back in ("", "Fast", "Pil"))
"""Those that split images into tiles with text between them, which is not done; without that each is one tile."""

MAX_TILES = 256
"""That an image is cut into."""

MAX_TILED_PIXELS = 2**26
"""Of all tiles of an image."""

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of an image's tensor, and what else its rows depend on."""


@dataclass(frozen=True)
class AnyResolution:
    """The whole image squeezed into one tile, and after it the image itself, resized in its own ratio to fit the best
    of some resolutions and padded with black, tile by tile. Only where an image is alone in its sample: of several ones
    each is one tile (LLaVA-OneVision; transformers' `LlavaOnevisionImageProcessorPil`)."""

    side: int
    resolutions: tuple[tuple[int, int], ...]
    only_alone = True

    def best(self, height: int, width: int) -> tuple[int, int]:
        """The resolution, height and width, that keeps most of the image's pixels and wastes fewest of its own."""

        def worth(resolution: tuple[int, int]) -> tuple[int, int]:
            h, w = resolution
            scale = min(w / width, h / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - h * w

        return max(self.resolutions, key=worth)  # of equal ones the first

    def extent(self, height: int, width: int) -> Extent:
        """Shape `(tiles, 3, side, side)`, and the size of the image in pixels."""
        h, w = self.best(height, width)
        return (1 + (h // self.side) * (w // self.side), 3, self.side, self.side), (height, width)

    def tiles(self, image: Image, resample: int) -> list[Image]:
        """The tiles of an RGB image."""
        from PIL import Image as pillow

        method = pillow.Resampling(resample)
        h, w = self.best(image.height, image.width)
        by_width, by_height = w / image.width, h / image.height
        if by_width < by_height:
            width, height = w, min(math.ceil(image.height * by_width), h)
        else:
            width, height = min(math.ceil(image.width * by_height), w), h
        canvas = pillow.new("RGB", (w, h))
        canvas.paste(image.resize((width, height), method), ((w - width) // 2, (h - height) // 2))
        return [image.resize((self.side, self.side), method), *_cut(canvas, self.side, self.side)]


@dataclass(frozen=True)
class Crops:
    """The image squeezed into the grid of `least` to `most` tiles whose ratio is nearest to its own, tile by tile, and
    after them the whole in one more tile if there are several (InternVL; transformers' `GotOcr2ImageProcessorPil`)."""

    height: int
    width: int
    least: int
    most: int
    only_alone = False

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns; of equal ratios the larger grid, unless the image is less than half as large."""
        best, smallest = (1, 1), math.inf
        for rows, columns in self._grids:
            difference = abs(width / height - columns / rows)
            enough = width * height > 0.5 * self.height * self.width * rows * columns
            if difference < smallest or (difference == smallest and enough):
                best, smallest = (rows, columns), difference
        return best

    @property
    def _grids(self) -> list[tuple[int, int]]:
        sides = range(1, self.most + 1)
        fitting = [(r, c) for c in sides for r in sides if self.least <= r * c <= self.most]
        return sorted(fitting, key=lambda grid: grid[0] * grid[1])

    def extent(self, height: int, width: int) -> Extent:
        """Shape `(tiles, 3, height, width)`."""
        rows, columns = self.grid(height, width)
        count = rows * columns
        return (count + (count > 1), 3, self.height, self.width), ()

    def tiles(self, image: Image, resample: int) -> list[Image]:
        """The tiles of an RGB image."""
        from PIL import Image as pillow

        method = pillow.Resampling(resample)
        rows, columns = self.grid(image.height, image.width)
        canvas = image.resize((columns * self.width, rows * self.height), method)
        whole = [image.resize((self.width, self.height), method)] if rows * columns > 1 else []
        return [*_cut(canvas, self.height, self.width), *whole]


@dataclass(frozen=True)
class LongestEdge:
    """An image's own ratio with the longer side of that many pixels, the other one even, before it is squeezed into its
    tile (Idefics 3; transformers' `get_resize_output_image_size`)."""

    pixels: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height."""
        ratio = width / height
        if width >= height:
            width, height = self.pixels, int(self.pixels / ratio)
            height += height % 2
        else:
            width, height = int(self.pixels * ratio), self.pixels
            width += width % 2
        return max(width, 1), max(height, 1)


def one_tile(config: Mapping[str, Any], where: str) -> tuple[LongestEdge | None, tuple[int, int]]:
    """What `SPLITS` make of an image that they do not split: a first resizing, and height and width of the tile. Raises
    RecipeError: other sizes than theirs."""
    size, tile = config.get("size"), config.get("max_image_size")
    side = tile.get("longest_edge") if isinstance(tile, Mapping) else None
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if not isinstance(side, int) or not isinstance(longest, int) or not 0 < longest <= 4096:
        raise RecipeError(
            f"{where}: size and max_image_size must be {{longest_edge}}, the first at most 4096, got {size!r}, {tile!r}"
        )
    return LongestEdge(longest), (side, side)


Tiling = AnyResolution | Crops


def _cut(image: Image, height: int, width: int) -> list[Image]:
    """Row by row."""
    corners = [(x, y) for y in range(0, image.height, height) for x in range(0, image.width, width)]
    return [image.crop((x, y, x + width, y + height)) for x, y in corners]


def tiling_of(config: Mapping[str, Any], size: object, cuts: bool | None, where: str) -> Tiling | None:
    """How a preprocessor_config.json has images cut into tiles; None where each is one.

    Args:
        size: what it says of the size of a tile, `(height, width)`.
        cuts: whether images are cut; None: as it says.
        where: what errors begin with.

    Raises:
        RecipeError: tiles of no fixed size.
    """
    kind = config.get("image_processor_type")
    if cuts is False or not (kind in ANY_RESOLUTION or (kind in CROPS and (config.get("crop_to_patches") or cuts))):
        return None
    if not isinstance(size, tuple) or (kind in ANY_RESOLUTION and size[0] != size[1]):
        raise RecipeError(f"{where}: size must be that of a tile, {{height, width}}, got {config.get('size')!r}")
    if kind in CROPS:
        least, most = (config.get(f"{name}_patches", default) for name, default in (("min", 1), ("max", 12)))
        if not (type(least) is int and type(most) is int and 0 < least <= most <= MAX_TILES):
            raise RecipeError(f"{where}: min_patches and max_patches must be 1 to {MAX_TILES}, got {least!r}, {most!r}")
        return Crops(size[0], size[1], least, most) if most > 1 else None
    given = config.get("image_grid_pinpoints")
    side = size[0] * MAX_TILES
    if not isinstance(given, list) or not given or not all(_is_resolution(resolution, side) for resolution in given):
        raise RecipeError(f"{where}: image_grid_pinpoints must be a list of [height, width], each up to {side}")
    return AnyResolution(size[0], tuple((h, w) for h, w in given))


def _is_resolution(value: Any, most: int) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and all(type(n) is int and 0 < n <= most for n in value) and value[0] * value[1] <= MAX_TILED_PIXELS


QWEN = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""`image_processor_type`s that resize so: those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

GLM = tuple(f"{name}ImageProcessor{back}" for name in ("Glm4v", "Glm46V") for back in ("", "Fast", "Pil"))
"""Those of GLM-4.1V to 4.6V."""

MAX_SIDE_RATIO = 200
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
        """What a preprocessor_config.json says; None for a processor of another kind. Raises RecipeError: sizes are
        missing."""
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
        """`(height, width)` of the result. Raises ValueError: an image that is too long."""
        if self.grows and min(height, width) < self.step:
            scale = max(self.step / height, self.step / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_SIDE_RATIO * min(height, width):
            raise ValueError(f"its sides are {width} x {height}; one may be at most {MAX_SIDE_RATIO} times the other")
        sides = [max(round(n / self.step), 1) * self.step for n in (height, width)]
        pixels = round(height / self.step) * round(width / self.step) * self.step**2 * self.frames
        if pixels > self.most:
            shrink = math.sqrt(self.frames * height * width / self.most)
            sides = [max(math.floor(n / shrink / self.step), 1) * self.step for n in (height, width)]
        elif pixels < self.least:
            grow = math.sqrt(self.least / (self.frames * height * width))
            sides = [math.ceil(n * grow / self.step) * self.step for n in (height, width)]
        return sides[0], sides[1]
