"""In which order a model's image processor cuts an image into patches: measured on the processor itself.

A tower takes patches in the order of its processor, which the model does not say: a wrong one would train silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from hetmesh.models.config_keys import hf

SIDES = (448, 672)
"""Height and width of the image that is cut: whole cells of patches of 14 and of 16 pixels, two to a side of a cell."""


@dataclass(frozen=True)
class PatchOrder:
    """How patches lie; by default as Qwen2-VL's processor cuts them.

    Attributes:
        grouped: the patches of one row of the result follow each other; else they go along the image's rows.
        channels_last: in a patch the channels are the last dim.
        flat: a patch is one dim; else it has those of an image.
    """

    grouped: bool = True
    channels_last: bool = False
    flat: bool = True

    def cut(self, image: Tensor, patch: int, merge: int, frames: int) -> Tensor:
        """`[channels, height, width]` -> its patches `[patches, ...]`; a patch stands for `frames` equal frames."""
        channels, height, width = image.shape
        cells = (height // patch // merge, width // patch // merge)
        parts = image.reshape(channels, cells[0], merge, patch, cells[1], merge, patch)
        grid = (1, 4, 2, 5) if self.grouped else (1, 2, 4, 5)
        patches = parts.permute(*grid, 0, 3, 6).reshape(-1, channels, patch, patch)
        if self.channels_last:
            patches = patches.permute(0, 2, 3, 1)
        if frames > 1:
            patches = patches.unsqueeze(2).expand(-1, -1, frames, -1, -1)
        return patches.flatten(1) if self.flat else patches


QWEN2_VL = PatchOrder()


@lru_cache(maxsize=16)
def processor_order(model_type: str) -> tuple[PatchOrder, int]:
    """The order of the image processor that transformers has for a `model_type`, and its frames to a patch. Raises
    LookupError if there is none that works here, or it cuts another way than all that are known."""
    import transformers

    names = _image_processors(model_type)
    name = names.get("pil")
    if name is None:
        what = f"{names['torchvision']} needs torchvision" if names.get("torchvision") else "transformers has none"
        raise LookupError(f"the order in which its processor cuts images into patches cannot be measured: {what}")
    plain = {"do_resize": False, "do_rescale": False, "do_normalize": False}
    processor = getattr(transformers, name)(**plain)
    patch, merge = processor.patch_size, getattr(processor, "merge_size", 1)
    image = torch.rand(3, *SIDES, generator=torch.Generator().manual_seed(0))
    given = torch.as_tensor(
        processor(images=[image.numpy()], return_tensors="pt", input_data_format="channels_first", **plain).pixel_values
    )
    patches = SIDES[0] // patch * (SIDES[1] // patch)
    frames = given.numel() // (patches * 3 * patch * patch)
    for options in product((True, False), (False, True), (True, False)):
        order = PatchOrder(*options)
        if frames > 1 and order.channels_last:
            continue
        cut = order.cut(image, patch, merge, max(frames, 1))
        if cut.shape == given.shape and torch.equal(cut, given.to(cut.dtype)):
            return order, frames
    raise LookupError(f"{name} cuts images into patches in an order that hetmesh does not know")


def _image_processors(model_type: str) -> Mapping[str, str]:
    """Class of the image processor by what it needs; where transformers names none for a `model_type` (Qwen3-VL-MoE),
    that of the others which have the same processor of images and text, if these have one alone."""
    of_images = hf("models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES")
    of_both = hf("models.auto.processing_auto.PROCESSOR_MAPPING_NAMES")
    if model_type in of_images or model_type not in of_both:
        return of_images.get(model_type, {})
    like = [of_images[kind] for kind, name in of_both.items() if name == of_both[model_type] and kind in of_images]
    return like[0] if like and all(options == like[0] for options in like) else {}
