"""Opened images, turned as their EXIF data say, and what a directory's image processor makes of one by itself.

A bound on the pixels of a file stands in front of processors, which have none.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from hetmesh.data.stores.store import Blob
from hetmesh.errors import RecipeError

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
MAX_PIXELS = 89_478_485
"""Of a file: Pillow's own bound."""
SIZES = ((64, 96), (230, 150), (1000, 1000))
"""Widths and heights of which a processor that makes one shape of all makes one."""


class ImageProcessor:
    """The image processor of a directory (transformers' `AutoImageProcessor`), for models that take images one by one,
    `[channels, height, width]` each. One that makes tiles is for whole processors.

    Args:
        folder: the directory.
        key: of the recipe, for errors.

    Raises:
        RecipeError: there is none, or it does not make one tensor of an image.
    """

    def __init__(self, folder: Path, key: str) -> None:
        from transformers import AutoImageProcessor

        self.key = f"{key} = '{folder}'"
        try:
            self.own: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self.extent = lru_cache(maxsize=4096)(self._extent)
            _ = self.fixed_shape
        except RecipeError:
            raise
        except Exception as error:  # whatever a broken directory, or a missing library, leads to
            raise RecipeError(f"{self.key}: {type(error).__name__}: {shorten(str(error), 500)}") from error

    @cached_property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape of every image; None where it depends on the image."""
        shapes = {self.extent(*size) for size in SIZES}
        return shapes.pop() if len(shapes) == 1 else None

    def _extent(self, width: int, height: int) -> tuple[int, ...]:
        """The shape that an image of this size gets."""
        from PIL import Image as pillow

        return tuple(self._values(pillow.new("RGB", (width, height))).shape)

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """The shape that an image gets, by its header at most. Raises OSError, ValueError: it cannot be read."""
        if self.fixed_shape is not None:
            return self.fixed_shape
        with blob.open() as file, open_image(file) as image:
            return self.extent(*upright_size(image))

    def __call__(self, file: BinaryIO | Path) -> Tensor:
        """An image as float32 `[channels, height, width]`. Raises OSError, ValueError: it cannot be read, or has more
        than 8 bits per channel or transparent pixels that the processor does not convert."""
        with open_image(file) as image:
            return self._values(upright(image, bool(getattr(self.own, "do_convert_rgb", False))))

    def _values(self, image: Image) -> Tensor:
        out = self.own(images=[image], return_tensors="pt")
        values = out.get("pixel_values")
        if set(out) != {"pixel_values"} or not isinstance(values, Tensor) or values.ndim != 4 or len(values) != 1:
            raise RecipeError(
                f"{self.key}: {type(self.own).__name__} makes {sorted(out)} of an image, not one tensor; give the "
                "whole directory as [data.options] processor"
            )
        return values[0].to(torch.float32)


def open_image(file: BinaryIO | Path) -> Image:
    """An image whose header has been read. Raises OSError, ValueError: it is none, too large, or an EPS program."""
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    try:
        image = pillow.open(file)
    except UnidentifiedImageError as error:  # whose text names the object that is read
        raise ValueError("it is no image that Pillow knows") from error
    if image.format == "EPS":
        image.close()
        raise ValueError("it is an EPS file, which is a program")
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels; at most {MAX_PIXELS} are read")
    return image


def upright_size(image: Image) -> tuple[int, int]:
    """Width and height of an image as it is seen, turned as its EXIF data say; at most its header is read."""
    from PIL import Image as pillow

    exif = pillow.Image.getexif(image)  # not that of PNG files, which looks behind the pixels too
    turned = exif.get(ORIENTATION) in SIDEWAYS and image.format != "TIFF"  # of which Pillow gives the size as seen
    return (image.height, image.width) if turned else image.size


def upright(image: Image, converts: bool) -> Image:
    """An opened image as processors take it: decoded, turned as its EXIF data say, in RGB, or as it is where it is
    transparent and the processor `converts` it. Raises OSError, ValueError: it cannot be read, has more than 8 bits per
    channel, or is transparent."""
    load_upright(image)
    if image.mode.startswith(("I", "F")):  # Pillow would clip them to 0..255
        raise ValueError(f"its pixels have more than 8 bits per channel (Pillow's mode {image.mode!r})")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        if not converts:
            raise ValueError("it is transparent, and its directory's image processor does not convert images to RGB")
        return image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


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
