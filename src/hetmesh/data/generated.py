"""Media that modules after the LLM make, in the assistant's turns: images, recordings, tensors; one shape per kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.images import open_image, upright
from hetmesh.data.media_files import read_recording
from hetmesh.data.stores.store import Blob, npy_shape
from hetmesh.data.turns import TENSOR
from hetmesh.errors import RecipeError

OUT = "_out"
"""Behind the type of a part of an assistant's turn: the kind of media that it is when it is made."""

DIMS = {"image": "[1 or 3 (channels), height, width]", "audio": "[samples]", TENSOR: "one size or more"}
"""Type of a part -> what the shape of its items is."""


class Generated:
    """Items of one kind: the text of the token that stands for one, their shape, and how their files are read.

    Images are float32 of -1..1, scaled to cover the shape and cut around their middle; recordings are the mean of their
    channels, of -1..1, with zeros behind their end; tensors are npy files of numbers.

    Args:
        kind: `image_out`, `audio_out` or `tensor_out`.
        options: its table in the recipe: `token`, `shape`, and `sampling_rate` of recordings.
        key: of the recipe, that of all kinds; errors begin with it.

    Raises:
        RecipeError: unknown kind, other keys, or a shape or rate that such items cannot have.
    """

    def __init__(self, kind: str, options: Any, key: str) -> None:
        self.form = kind.removesuffix(OUT)
        if self.form not in DIMS or self.form == kind:
            raise RecipeError(f"{key}: unknown kind {kind!r}; valid are {[form + OUT for form in DIMS]}")
        keys = ["token", "shape", *(["sampling_rate"] if self.form == "audio" else [])]
        if not isinstance(options, Mapping) or sorted(options) != sorted(keys) or not isinstance(options["token"], str):
            raise RecipeError(f"{key}.{kind}: must be a table of {', '.join(keys)}, got {options!r}")
        shape, self._rate = options["shape"], options.get("sampling_rate", 1)
        numbers = [*shape, self._rate] if isinstance(shape, list | tuple) else [0]
        fits = {"image": len(numbers) == 4 and numbers[0] in (1, 3), "audio": len(numbers) == 2}
        if any(type(n) is not int or n < 1 for n in numbers) or not fits.get(self.form, len(numbers) > 1):
            raise RecipeError(
                f"{key}.{kind}: shape must be {DIMS[self.form]}, all numbers whole and above 0, got {dict(options)}"
            )
        self.token, self.fixed_shape = options["token"], tuple(shape)

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """That of all items; nothing is read."""
        return self.fixed_shape

    def __call__(self, file: BinaryIO) -> Tensor:
        """An item, float32. Raises OSError, ValueError: it cannot be read, is transparent, longer or of another shape,
        or has a number that is not finite."""
        read = {"image": self._image, "audio": self._recording, TENSOR: self._tensor}[self.form]
        values = torch.from_numpy(np.ascontiguousarray(read(file), np.float32))
        if not values.isfinite().all():
            raise ValueError("it has numbers that are not finite")
        return values

    def _image(self, file: BinaryIO) -> np.ndarray:
        from PIL import Image, ImageOps

        channels, height, width = self.fixed_shape
        with open_image(file) as image:
            seen = upright(image, converts=True)
            if seen.mode == "RGBA" and seen.getchannel("A").getextrema() != (255, 255):
                raise ValueError("it is transparent, and what lies behind it is not known; save it without")
            covering = ImageOps.fit(
                seen.convert("L" if channels == 1 else "RGB"), (width, height), Image.Resampling.BICUBIC
            )
        pixels = np.asarray(covering, np.float32).reshape(height, width, channels)
        return pixels.transpose(2, 0, 1) / 127.5 - 1

    def _recording(self, file: BinaryIO) -> np.ndarray:
        sound, (samples,) = read_recording(file, self._rate), self.fixed_shape
        if len(sound) > samples:
            raise ValueError(f"it has {len(sound)} samples at {self._rate} per second, more than the shape's {samples}")
        return np.pad(sound, (0, samples - len(sound)))

    def _tensor(self, file: BinaryIO) -> np.ndarray:
        found = npy_shape(file, file.seek(0, 2) - file.seek(0))
        if found != self.fixed_shape:
            raise ValueError(f"it has the shape {list(found)}, not {list(self.fixed_shape)}")
        file.seek(0)
        return np.load(file, allow_pickle=False)
