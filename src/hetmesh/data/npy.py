"""Headers of npy files: what they claim is compared with what there is, before memory is taken for it."""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np


def npy_shape(file: BinaryIO, length: int, kinds: str = "fiu") -> tuple[int, ...]:
    """The shape of the array that `file` holds from here on, from its header.

    Args:
        length: bytes of the file.
        kinds: numpy's letters of the types that it may be of.

    Raises:
        ValueError: it is no npy file, of another type, or claims more than the file holds.
    """
    start = file.tell()
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = read(file)
    except Exception as error:  # a header is a Python literal, and whatever reading one may raise
        raise ValueError(f"its header is none: {error or type(error).__name__}") from error
    if dtype.kind not in kinds:
        raise ValueError(f"its values are of type {dtype}, not numbers")
    left, needed = length - (file.tell() - start), math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or needed > left:
        raise ValueError(f"its header says {list(shape)}, {needed} bytes, and there are {left}")
    return shape
