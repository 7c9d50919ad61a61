"""Image files as the 8x8 digits of the demo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.images import load_upright, open_image
from hetmesh.data.media_reader import BROKEN
from hetmesh.data.spans import FileSpan
from hetmesh.errors import SampleError

SIDE = 8


def read_digit(path: Path) -> Tensor:
    """An image file as float32 `[1, 8, 8]`, values -1 (paper) to 1 (ink), as the demo's own images are.

    The colour at the border is paper, what differs from it most is ink, so both black on white and white on black do.
    Of an image of another size each of 8x8 fields is its mean.

    Raises:
        SampleError: the file cannot be read, or is of one colour.
    """
    from PIL import Image

    try:
        with FileSpan(path).open() as file, open_image(file) as image:
            load_upright(image)
            pixels = np.asarray(image.convert("L"), np.float32)
            border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            ink = np.abs(pixels - np.median(border))
            if ink.max() == 0:
                raise SampleError(f"{path}: the image has one colour, there is no digit in it")
            small = Image.fromarray(ink / ink.max()).resize((SIDE, SIDE), Image.Resampling.BOX)
    except (OSError, ValueError, Image.DecompressionBombError, *BROKEN) as error:
        if isinstance(error, SampleError):
            raise
        raise SampleError(f"{path} cannot be read as an image: {error or type(error).__name__}") from error
    return torch.from_numpy(np.array(small) * 2 - 1).unsqueeze(0)
