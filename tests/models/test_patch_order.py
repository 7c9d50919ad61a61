"""The order of patches is that of transformers' own image processors."""

from __future__ import annotations

import pytest
import torch

from hetmesh.models.split.patch_order import QWEN2_VL, PatchOrder, processor_order


def test_patches_of_a_row_of_the_result_lie_behind_each_other_or_along_the_image():
    image = torch.arange(16.0).view(1, 4, 4)  # 4 patches of 2 x 2 pixels, one cell of 2 x 2 patches
    assert QWEN2_VL.cut(image, 1, 2, 1).flatten()[:4].tolist() == [0, 1, 4, 5]
    assert PatchOrder(grouped=False).cut(image, 1, 2, 1).flatten()[:4].tolist() == [0, 1, 2, 3]
    assert QWEN2_VL.cut(image, 2, 2, 2)[0].tolist() == [0, 1, 4, 5, 0, 1, 4, 5]  # in each of two frames
    assert PatchOrder(flat=False).cut(image, 2, 2, 1).shape == (4, 1, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "order", "frames"),
    [
        ("qwen2_5_vl", QWEN2_VL, 2),
        ("glm4v", QWEN2_VL, 2),
        ("paddleocr_vl", PatchOrder(grouped=False, flat=False), 1),
        ("cosmos3_edge", PatchOrder(channels_last=True), 1),
    ],
)
def test_orders_are_measured(model_type, order, frames):
    assert processor_order(model_type) == (order, frames)


@pytest.mark.parametrize(("model_type", "says"), [("kimi_k25", "needs torchvision"), ("llava_x", "has none")])
def test_an_order_that_cannot_be_measured_is_an_error(model_type, says):
    with pytest.raises(LookupError, match=f"cannot be measured: .*{says}"):
        processor_order(model_type)
