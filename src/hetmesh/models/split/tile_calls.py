"""How images of any resolution are handed to a model that packs the rows of their tiles by their size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetmesh.errors import SampleError


@dataclass(frozen=True)
class AnyResolutionTiles:
    """Images of one tile, `[channels, side, side]`, or cut into tiles, `[tiles, channels, side, side]`, whose size is
    that of the image in pixels: the whole one, then those of the best of some resolutions (LLaVA-OneVision). The model
    unpads the rows of the latter, and puts one row behind each line of them.

    Attributes:
        size: of a tile.
        cells: rows of a tile along each side.
        resolutions: `(height, width)` each.
        most: tiles whose rows are kept; those of more are interpolated.
    """

    size: tuple[int, int, int]
    cells: int
    resolutions: tuple[tuple[int, int], ...]
    most: int

    @property
    def blank(self) -> tuple[int, ...]:
        return self.size

    @property
    def larger(self) -> tuple[int, ...]:
        height, width = min((each for each in self.resolutions if self._tiles(*each) > 1), default=self.size[1:])
        return self.extent(height, max(1, 2 * width // 3))

    def size_dims(self, shape: tuple[int, ...]) -> int:
        return 2 if len(shape) == 6 else 0

    def extent(self, height: int, width: int) -> tuple[int, ...]:
        """Of an image of that size in pixels."""
        return (1 + self._tiles(*self._best(height, width)), *self.size, height, width)

    def _best(self, height: int, width: int) -> tuple[int, int]:
        from transformers.image_processing_utils import select_best_resolution

        return select_best_resolution((height, width), list(self.resolutions))

    def _tiles(self, height: int, width: int) -> int:
        return (height // self.size[1]) * (width // self.size[2])

    def check(self, shape: tuple[int, ...]) -> None:
        if shape in (self.size, (1, *self.size)):
            return
        if len(shape) != 6 or shape[1:4] != self.size or min(shape[4:]) < 1:
            raise SampleError(
                f"images must be of shape {self.size}, or tiles of that shape with the height and width of the image "
                f"before it was cut as their size (MediaItem.size), got {shape}"
            )
        if shape != (expected := self.extent(*shape[4:])):
            raise SampleError(
                f"an image of {shape[4]} x {shape[5]} pixels must be cut into {expected[0]} tiles "
                f"(image_grid_pinpoints in config.json), got {shape[0]}"
            )

    def units(self, shape: tuple[int, ...]) -> int:
        """Rows, by the arithmetic of transformers' `unpad_image` and `pack_image_features`."""
        if len(shape) != 6:
            return self.cells**2 + 1
        height, width = shape[4:]
        best = self._best(height, width)
        rows, columns = (self.cells * (n // side) for n, side in zip(best, self.size[1:], strict=True))
        if width / height > columns / rows:
            rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
        else:
            columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
        if (ratio := math.sqrt(rows * columns / (self.most * self.cells**2))) > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return self.cells**2 + rows * (columns + 1)

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        """Images of one tile first, two at least: a single one would be taken for one that was cut."""
        sizes = sizes or [()] * len(items)
        single = [i for i, size in enumerate(sizes) if not size]
        cut = [i for i, size in enumerate(sizes) if size]
        if len(single) == 1:
            single *= 2
        called = single + cut
        return {
            "media": torch.cat([items[i].reshape(-1, *self.size) for i in called]),
            "sizes": torch.tensor([sizes[i] or self.size[1:] for i in called]),
            "together": torch.tensor([len(single)] * bool(single) + [1] * len(cut)),
            "kept": torch.tensor([called.index(i) for i in range(len(items))]),
        }

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            "pixel_values": batch["media"],
            "image_sizes": batch["sizes"],
            "batch_num_images": batch["together"].tolist(),
        }

    def grid(self, shape: tuple[int, ...]) -> None:
        return None
