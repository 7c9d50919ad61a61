"""How media items are handed to a model's `get_..._features`: one value per way, chosen by family or by signature.

All items of a lane and microbatch go in one call, so that ranks which shard a tower together call it equally often.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from hetmesh.errors import SampleError
from hetmesh.models.collate import stacked
from hetmesh.models.split.patch_order import QWEN2_VL, PatchOrder, processor_order
from hetmesh.models.split.whole_model import features_of


class ItemCall(Protocol):
    """One way. `shape` is always the extent of an item: the shape of its tensor, then its size if it has one
    (`hetmesh.graph.MediaItem`)."""

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the smallest item and of a larger one."""

    @property
    def blank(self) -> tuple[int, ...]:
        """The shape of the smallest item."""
        return self.examples()[0]

    def units(self, shape: tuple[int, ...]) -> int:
        """How many equal parts an item is made of, each of as many rows."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise SampleError for an item that it cannot hand over."""

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        """At least one item, and their sizes if they have some -> tensors. `"kept"`, if it is there, is as long as the
        items, where the model is called with more."""

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """What `collate` made -> keyword arguments of the model's method, and of its forward."""

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """The rows of an item as frames, height and width, where the model wants positions of these axes."""
        return None

    def size_dims(self, shape: tuple[int, ...]) -> int:
        """How many numbers of an extent are the size."""
        return 0


@dataclass(frozen=True)
class Pixels(ItemCall):
    """Images of one size, `[channels, height, width]` or several tiles of it, `[tiles, channels, height, width]`."""

    size: tuple[int, int, int]

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.size, (2, *self.size)

    def units(self, shape: tuple[int, ...]) -> int:
        return shape[0] if len(shape) == 4 else 1

    def check(self, shape: tuple[int, ...]) -> None:
        if shape[-3:] != self.size or len(shape) not in (3, 4) or shape[0] < 1:
            raise SampleError(f"images must be of shape {self.size}, or tiles of that shape, got {shape}")

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        if all(item.shape == self.size for item in items):
            return {"media": stacked(items)}
        return {"media": torch.cat([item.reshape(-1, *self.size) for item in items])}

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"pixel_values": batch["media"]}


@dataclass(frozen=True)
class Tiles(Pixels):
    """The same for models that take the tiles of one sample together, `[1, tiles, ...]`, and leave out blank ones
    (tiles of zeros): the last digit of a blank tile's first pixel is changed."""

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        media = batch["media"]
        blank = media.flatten(1).eq(0).all(dim=1).view(-1, 1, 1, 1)
        return {"pixel_values": torch.where(blank, torch.finfo(media.dtype).tiny, media)[None]}


@dataclass(frozen=True)
class Sized(ItemCall):
    """Images of any size that is whole cells of `step` pixels, two of them at least, padded to the largest, with their
    sizes. (transformers' Mistral 3 takes a single row for no row.)"""

    channels: int
    step: int

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.channels, self.step, 2 * self.step), (self.channels, 2 * self.step, 3 * self.step)

    def units(self, shape: tuple[int, ...]) -> int:
        return (shape[1] // self.step) * (shape[2] // self.step)

    def check(self, shape: tuple[int, ...]) -> None:
        _check_cells(shape, self.channels, self.step)
        if self.units(shape) < 2:
            raise SampleError(f"images must be of more than one cell of {self.step} x {self.step} pixels, got {shape}")

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        shapes = torch.tensor([item.shape[1:] for item in items])
        media = items[0].new_zeros(len(items), self.channels, *shapes.amax(dim=0).tolist())
        for row, item in zip(media, items, strict=True):
            row[:, : item.shape[1], : item.shape[2]] = item
        return {"media": media, "sizes": shapes}

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"pixel_values": batch["media"], "image_sizes": batch["sizes"]}


@dataclass(frozen=True)
class Patches(ItemCall):
    """Images of any size that is whole cells of `merge` patches, cut into patches in the `order` of the model's
    processor. An image stands for `frames` equal frames."""

    channels: int
    patch: int
    merge: int
    frames: int
    order: PatchOrder = QWEN2_VL
    names_merge: bool = False

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        step = self.patch * self.merge
        return (self.channels, step, step), (self.channels, 2 * step, 3 * step)

    def units(self, shape: tuple[int, ...]) -> int:
        _, height, width = self.grid(shape)
        return height * width

    def check(self, shape: tuple[int, ...]) -> None:
        _check_cells(shape, self.channels, self.patch * self.merge)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        step = self.patch * self.merge
        return 1, shape[1] // step, shape[2] // step

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        grids = [(1, item.shape[1] // self.patch, item.shape[2] // self.patch) for item in items]
        patches = [self.order.cut(item, self.patch, self.merge, self.frames) for item in items]
        return {"media": torch.cat(patches), "grids": torch.tensor(grids)}

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        given = {"pixel_values": batch["media"], "image_grid_thw": batch["grids"]}
        if self.names_merge:
            given["image_merge_sizes"] = torch.full((len(batch["grids"]),), self.merge)
        return given


@dataclass(frozen=True)
class SingleTiles(Pixels):
    """Images of one tile each, two at least, since LLaVA-OneVision takes a single one for one that was cut into tiles.
    (What is cut comes from its processor.)"""

    def examples(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.size, self.size

    def check(self, shape: tuple[int, ...]) -> None:
        if shape != self.size:
            raise SampleError(
                f"images must be of shape {self.size}, got {shape}; tiles are what the directory's own processor makes"
            )

    def collate(self, items: Sequence[Tensor], sizes: Sequence[tuple[int, ...]] = ()) -> dict[str, Tensor]:
        images = stacked(items) if len(items) > 1 else torch.stack([*items, *items])
        return {"media": images, "kept": torch.arange(len(items))}

    def arguments(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        sizes = torch.tensor([self.size[1:]] * len(batch["media"]))
        return {"pixel_values": batch["media"], "image_sizes": sizes, "batch_num_images": [len(sizes)]}


def _check_cells(shape: tuple[int, ...], channels: int, step: int) -> None:
    if len(shape) != 3 or shape[0] != channels or any(n < 1 or n % step for n in shape[1:]):
        raise SampleError(
            f"images must be of shape ({channels}, height, width), sides multiples of {step} pixels, got {shape}"
        )


def apart(call: ItemCall, extent: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of an item's tensor, and its size."""
    end = len(extent) - call.size_dims(extent)
    return extent[:end], extent[end:]


def image_call(name: str | None, model: Any, config: Any) -> ItemCall:
    """How images are handed to `model`: as the entry `name` of `CALLS`, or by its `get_image_features`."""
    vision = getattr(config, "vision_config", config)
    if name is not None:
        return CALLS[name](config, vision)
    parameters = inspect.signature(features_of(model, "image")).parameters
    required = required_arguments(parameters)
    if unknown := required - {"pixel_values", "image_sizes", "image_grid_thw", "image_merge_sizes"}:
        raise LookupError(f"its get_image_features wants {sorted(unknown)} too, which hetmesh does not make")
    if "image_grid_thw" in parameters:
        return _patches_in_order(config, vision, "image_merge_sizes" in parameters)
    if "image_sizes" in required or getattr(vision, "model_type", "") == "pixtral":
        return _sized(config, vision)
    return (Tiles if "pixel_attention_mask" in parameters else Pixels)(_size(config, vision))


def required_arguments(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Names of the arguments that a method must be called with."""
    return {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


def _patches_in_order(config: Any, vision: Any, names_merge: bool) -> Patches:
    """In the order of the processor, which also says how many patches are merged where the model takes that number."""
    order, frames = processor_order(config.model_type)
    merge = 1 if names_merge else _merge(config, vision)
    frames = getattr(vision, "temporal_patch_size", None) or frames
    return Patches(_channels(vision), _pair(vision.patch_size)[0], merge, _pair(frames)[0], order, names_merge)


def _merge(config: Any, vision: Any) -> int:
    """Patches along a side of what becomes one row."""
    for part, key in product((vision, config), ("spatial_merge_size", "merge_size", "merge_kernel_size")):
        if found := getattr(part, key, None):
            return _pair(found)[0]
    raise LookupError("nothing says how many of its patches become one row")


def _size(config: Any, vision: Any) -> tuple[int, int, int]:
    height, width = _pair(vision.image_size)
    return _channels(vision), height, width


def _channels(vision: Any) -> int:
    return getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, Mapping):
        value = (value["height"], value["width"])
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _sized(config: Any, vision: Any) -> Sized:
    merge = getattr(config, "spatial_merge_size", None) or getattr(vision, "spatial_merge_size", None) or 1
    return Sized(_channels(vision), _pair(vision.patch_size)[0] * merge)


def _patches(config: Any, vision: Any) -> Patches:
    return Patches(_channels(vision), vision.patch_size, _merge(config, vision), vision.temporal_patch_size)


CALLS: Mapping[str, Callable[[Any, Any], ItemCall]] = MappingProxyType(
    {"single_tiles": lambda config, vision: SingleTiles(_size(config, vision)), "patches": _patches}
)
"""Ways for images by name, made from the whole model's config and that of its tower."""
