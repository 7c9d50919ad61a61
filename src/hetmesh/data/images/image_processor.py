"""Images as a vision tower wants them: what a Hugging Face preprocessor_config.json says, in Pillow and numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.images import image_tiles
from hetmesh.data.images.image_settings import image_settings
from hetmesh.errors import RecipeError
from hetmesh.recipe.hf_families import PROMPTS

if TYPE_CHECKING:
    from PIL.Image import Image

STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
"""What is done; whatever else a directory asks for is refused."""

UNSUPPORTED = ("image_grid_pinpoints", "crop_to_patches", "resize_to_max_canvas")
"""Further steps, which are not called `do_...`."""

TILED = ("image_grid_pinpoints", "crop_to_patches", "do_pad")
"""What cutting images into tiles takes care of; `do_pad` is about batches of them."""

LEFT_OUT = ("do_image_splitting", "do_pan_and_scan")
"""What a recipe can have left out (`image_tiles = false`): an image is one tile, as with the processor's own option."""

MAX_PIXELS = 89_478_485
"""Of what becomes of an image: the most that Pillow opens without a warning. A slender image can become large where its
shorter side is resized, or where it is put on a square."""

ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""EXIF's tag, and its values with which the height of what is stored is the width of what is seen."""


@dataclass(frozen=True)
class ImageProcessor:
    """Resize, crop to the centre, scale and normalise, each if the directory has it on.

    Attributes:
        resize: `(height, width)`, or the length of the shorter edge, or a number of pixels, or None to leave images as
            they are.
        crop: `(height, width)` cut out of the centre (what is smaller is padded with black), or None.
        resample: Pillow's number of the filter.
        scale: factor on the values 0..255.
        mean, std: per channel, of the scaled values; None leaves them.
        pad_to_square: first put the image on a square of the mean colour (as LLaVA does).
        tiling: how images are cut into tiles; None: each is one.
        first: a resizing before the one to `resize`.
        composites: transparent images are put on white, as transformers does; else they are refused.
    """

    resize: tuple[int, int] | int | image_tiles.PixelBudget | None
    crop: tuple[int, int] | None
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pad_to_square: bool = False
    tiling: image_tiles.Tiling | None = None
    first: image_tiles.LongestEdge | None = None
    composites: bool = True

    @classmethod
    def from_directory(
        cls, folder: Path, key: str, pad_to_square: bool = False, tiles: bool | None = None
    ) -> ImageProcessor:
        """What `folder` says of images, as transformers reads it (`image_settings`).

        Args:
            key: the recipe key that names the folder; errors begin with it.
            tiles: whether images are cut into tiles, by processors that can; None: as the file says.

        Raises:
            RecipeError: it says nothing, or asks for something else than the steps above.
        """
        settings = image_settings(folder, key)
        config, kind, where = settings.config, settings.kind, settings.where
        resizes = config.get("do_resize", True)
        tiling: image_tiles.Tiling | None = None
        done: Sequence[str] = ()
        if resizes and kind in (*image_tiles.ANY_RESOLUTION, *image_tiles.CROPS):
            tiling, done = image_tiles.tiling_of(config, _size(config["size"], f"{where}: size"), tiles, where), TILED
        if kind in image_tiles.SPLITS:
            done = ("do_pad",)
        if tiles is False:
            done = (*done, *LEFT_OUT)
        others = [name for name in config if name in UNSUPPORTED or (name.startswith("do_") and name not in STEPS)]
        if found := [name for name in others if config[name] and name not in done]:
            can = "; with [data.options] image_tiles = false an image is one tile"
            hint = can if set(found) <= set(LEFT_OUT) else ""
            raise RecipeError(f"{where} asks for {found}, which this source does not do{hint}")
        if settings.unknown:
            raise RecipeError(f"{where}: {settings.unknown}")
        known = PROMPTS.get(settings.processor)
        if tiling is not None and settings.processor and (known is None or not known.tiles):
            raise RecipeError(
                f"{where}: images are cut into tiles, and what {settings.processor} writes between these hetmesh does "
                "not know; with [data.options] image_tiles = false an image is one tile"
            )
        resize: tuple[int, int] | int | image_tiles.PixelBudget | None = None
        first: image_tiles.LongestEdge | None = None
        if resizes and kind in image_tiles.SPLITS:
            first, resize = image_tiles.one_tile(config, where)
        elif resizes and (resize := image_tiles.PixelBudget.of(config, where)) is None:
            size = _size(config.get("size", 224), f"{where}: size")
            resize = size[0] if isinstance(size, list) else size
        crop = None
        if config.get("do_center_crop", "crop_size" in config):
            size = _size(config.get("crop_size", 224), f"{where}: crop_size")
            crop = (size[0], size[0]) if isinstance(size, list) else size
        normalize = config.get("do_normalize", "image_mean" in config)
        return cls(
            resize,
            crop,
            int(config.get("resample", 3)),
            float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
            tuple(config["image_mean"]) if normalize else None,
            tuple(config["image_std"]) if normalize else None,
            pad_to_square or kind in image_tiles.ANY_RESOLUTION,
            tiling,
            first,
            bool(config.get("do_convert_rgb", True)),
        )

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape of every result, `(3, height, width)`; None if it depends on the image."""
        return None if self.tiling is not None else self._fixed_tile

    @property
    def _fixed_tile(self) -> tuple[int, ...] | None:
        if self.crop is not None:
            return (3, *self.crop)
        if isinstance(self.resize, tuple):
            return (3, *self.resize)
        return (3, self.resize, self.resize) if isinstance(self.resize, int) and self.pad_to_square else None

    def extent(self, width: int, height: int, alone: bool) -> image_tiles.Extent:
        """Shape and size (`MediaItem.size`) of the result for an image of this size in pixels.

        Args:
            alone: whether it is the only one of its sample, in which case alone some processors cut it into tiles.
        """
        tiling = self._tiling(alone)
        return (self.shape(width, height), ()) if tiling is None else tiling.extent(height, width)

    def _tiling(self, alone: bool) -> image_tiles.Tiling | None:
        return None if self.tiling is None or (self.tiling.only_alone and not alone) else self.tiling

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """Shape of the result for an image of this size in pixels that is one tile, `(3, height, width)`."""
        if (fixed := self._fixed_tile) is not None:
            return fixed
        if self.pad_to_square:
            width = height = _bounded(max(width, height), max(width, height))[0]
        return (3, *self._resized(width, height))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        return _bounded(*self._own_size(width, height))

    def _own_size(self, width: int, height: int) -> tuple[int, int]:
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        if isinstance(self.resize, image_tiles.PixelBudget):
            return self.resize.resized(width, height)
        short, long = min(width, height), max(width, height)
        other = int(self.resize * long / short)
        return (other, self.resize) if width < height else (self.resize, other)

    def __call__(self, image: Image, alone: bool = True) -> Tensor:
        """The image as float32 `[3, height, width]`, or as tiles `[tiles, 3, height, width]`; see `extent`. Raises
        OSError, ValueError: it cannot be read, or has more than 8 bits per channel."""
        load_upright(image)
        if image.mode.startswith(("I", "F")):  # Pillow would clip them to 0..255
            raise ValueError(f"its pixels have more than 8 bits per channel (Pillow's mode {image.mode!r})")
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = self._on_white(image)
        if image.mode != "RGB":
            image = image.convert("RGB")
        if (tiling := self._tiling(alone)) is not None:
            return torch.stack([self._values(tile) for tile in tiling.tiles(image, self.resample)])
        return self._values(self._resize(image))

    def _on_white(self, image: Image) -> Image:
        from PIL import Image as pillow

        if not self.composites:
            raise ValueError("it is transparent, and its directory's image processor does not convert images to RGB")
        image = image.convert("RGBA")
        return pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image)

    def _resize(self, image: Image) -> Image:
        """An RGB image on its square, if it shall be on one, and of the size that it shall have."""
        from PIL import Image as pillow

        if self.pad_to_square and image.width != image.height:
            side, _ = _bounded(max(image.size), max(image.size))
            colour = tuple(int(255 * m) for m in self.mean or (0, 0, 0))
            square = pillow.new("RGB", (side, side), colour)
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = square
        if self.first is not None:
            image = image.resize(self.first.resized(*image.size), pillow.Resampling(self.resample))
        height, width = self._resized(*image.size)
        if (width, height) != image.size:
            image = image.resize((width, height), pillow.Resampling(self.resample))
        return image

    def _values(self, image: Image) -> Tensor:
        """The pixels of an RGB image, cut to the centre, as float32 `[3, height, width]`."""
        pixels = np.asarray(image)
        if self.crop is not None:
            pixels = _centre(pixels, *self.crop)
        values = np.empty((3, *pixels.shape[:2]), np.float32)
        for channel, table in enumerate(self._tables):
            np.take(table, pixels[:, :, channel], out=values[channel], mode="clip")  # the mode that needs no copy
        return torch.from_numpy(values)

    @cached_property
    def _tables(self) -> np.ndarray:
        """What becomes of the values 0..255 of each channel, float32 `[3, 256]`."""
        values = np.tile(np.arange(256, dtype=np.float32), (3, 1)) * np.float32(self.scale)
        if self.mean is not None and self.std is not None:
            mean, std = (np.asarray(v, np.float32)[:, None] for v in (self.mean, self.std))
            values = (values - mean) / std
        return values


def open_image(file: BinaryIO | Path) -> Image:
    """An image whose header has been read. Raises OSError, ValueError: it is none, or one that Pillow has another
    program draw."""
    from PIL import Image as pillow

    image = pillow.open(file)
    if image.format == "EPS":
        image.close()
        raise ValueError("it is an EPS file, which is a program")
    return image


def upright_size(image: Image) -> tuple[int, int]:
    """Width and height of an image as it is seen, turned as its EXIF data say; at most its header is read."""
    from PIL import Image as pillow

    exif = pillow.Image.getexif(image)  # not that of PNG files, which looks behind the pixels too
    turned = (
        exif.get(ORIENTATION) in SIDEWAYS and image.format != "TIFF"
    )  # of which Pillow gives the size as it is seen
    return (image.height, image.width) if turned else image.size


def load_upright(image: Image) -> None:
    """Decode an image, turned as its EXIF data say. Raises OSError, ValueError: it cannot be read, or its header does
    not show how it is turned."""
    from PIL import ImageOps

    header = set(image.info)
    image.load()  # which may change its mode
    if image.getexif().get(ORIENTATION, 1) == 1:
        return
    if image.format == "PNG" and "exif" not in header and "exif" in image.info:
        raise ValueError("its EXIF orientation stands behind its pixels, where no header shows it; save it anew")
    ImageOps.exif_transpose(image, in_place=True)


def _size(value: Any, where: str) -> tuple[int, int] | list[int]:
    """`(height, width)`, or `[shortest edge]`."""
    sides: tuple[Any, ...] = ()
    if isinstance(value, int):
        sides = (value,)
    if isinstance(value, Mapping) and {"height", "width"} <= set(value):
        sides = value["height"], value["width"]
    if isinstance(value, Mapping) and set(value) == {"shortest_edge"}:
        sides = (value["shortest_edge"],)
    if not sides:
        raise RecipeError(f"{where}: must be a number, {{height, width}} or {{shortest_edge}}, got {value!r}")
    if not all(type(side) is int and side > 0 for side in sides) or sides[0] * sides[-1] > MAX_PIXELS:
        raise RecipeError(f"{where}: must be positive, of at most {MAX_PIXELS} pixels, got {value!r}")
    return [sides[0]] if len(sides) == 1 else (sides[0], sides[1])


def _bounded(height: int, width: int) -> tuple[int, int]:
    if not 0 < height * width <= MAX_PIXELS:
        raise ValueError(f"it would become {width} x {height} pixels; at most {MAX_PIXELS} are made")
    return height, width


def _centre(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The central `[height, width]` of `[h, w, 3]`, padded with zeros where it is smaller."""
    missing = [max(want - have, 0) for want, have in zip((height, width), pixels.shape, strict=False)]
    if any(missing):
        pixels = np.pad(pixels, [*((math.ceil(m / 2), m // 2) for m in missing), (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
