"""Images cut into tiles: number, pixels and rows are those of transformers' own processors and models."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from hetmesh.data.images.image_processor import ImageProcessor
from hetmesh.errors import RecipeError, SampleError
from hetmesh.models.split.item_calls import AnyResolutionTiles

SIZES = [(21, 37), (80, 9), (16, 16), (5, 7), (9, 80), (33, 16), (1, 50), (30, 31)]
RESOLUTIONS = [[8, 8], [8, 16], [16, 8], [16, 16], [24, 8], [8, 24], [8, 32]]


def picture(height, width):
    draw = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(processor, folder, **changes):
    processor.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return ImageProcessor.from_directory(folder, "key")


@pytest.mark.parametrize("size", SIZES)
def test_llava_onevisions_tiles_are_those_of_transformers(tmp_path, size):
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    theirs = LlavaOnevisionImageProcessorPil(size={"height": 8, "width": 8}, image_grid_pinpoints=RESOLUTIONS)
    ours = saved(theirs, tmp_path)
    image = picture(*size)
    alone = theirs(images=[[image]], return_tensors="pt")["pixel_values"][0]
    assert ours.extent(image.width, image.height, True) == (tuple(alone.shape), size)
    torch.testing.assert_close(ours(image, True), alone, rtol=0, atol=1e-5)
    several = theirs(images=[[image, image]], return_tensors="pt")["pixel_values"][0]
    assert ours.extent(image.width, image.height, False) == ((3, 8, 8), ())
    torch.testing.assert_close(ours(image, False)[None], several, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_internvls_tiles_are_those_of_transformers(tmp_path, size):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    theirs = GotOcr2ImageProcessorPil(size={"height": 8, "width": 8}, max_patches=6)
    ours = saved(theirs, tmp_path, processor_class="InternVLProcessor")
    image = picture(*size)
    expected = theirs(images=[image], crop_to_patches=True, return_tensors="pt")["pixel_values"]  # as its processor
    assert ours.extent(image.width, image.height, False) == (tuple(expected.shape), ())
    torch.testing.assert_close(ours(image, False), expected, rtol=0, atol=1e-5)
    assert ImageProcessor.from_directory(tmp_path, "key", tiles=False).fixed_shape == (3, 8, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["idefics3.Idefics3", "smolvlm.SmolVLM"])
def test_idefics_3s_images_of_one_tile_are_those_of_transformers(tmp_path, family, size):
    folder, name = family.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    theirs = getattr(module, f"{name}ImageProcessorPil")(size={"longest_edge": 20}, max_image_size={"longest_edge": 8})
    with pytest.raises(
        RecipeError, match=r"do_image_splitting'\], which .*; with \[data.options\] image_tiles = false"
    ):
        saved(theirs, tmp_path)
    ours = ImageProcessor.from_directory(tmp_path, "key", tiles=False)
    image = picture(*size)
    expected = theirs(images=[image], do_image_splitting=False, return_tensors="pt")["pixel_values"][0, 0]
    assert ours.fixed_shape == tuple(expected.shape) == (3, 8, 8)
    torch.testing.assert_close(ours(image), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("Idefics3ImageProcessor", {}, r"asks for \['do_image_splitting'\]"),
        ("SmolVLMImageProcessorFast", {}, r"asks for \['do_image_splitting'\]"),
        ("LlavaNextImageProcessor", {}, r"asks for \['do_pad', 'image_grid_pinpoints'\]"),
        ("CLIPImageProcessor", {"crop_to_patches": True}, r"asks for \['crop_to_patches'\]"),
        (
            "GotOcr2ImageProcessor",
            {"crop_to_patches": True, "size": {"shortest_edge": 8}},
            r"size must be that of a tile, .* got {'shortest_edge': 8}",
        ),
    ],
)
def test_tiles_that_are_not_made_are_refused_also_where_they_are_a_default(tmp_path, kind, more, says):
    config = {"image_processor_type": kind, "size": {"height": 8, "width": 8}, **more}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=says):
        ImageProcessor.from_directory(tmp_path, "key")


@pytest.mark.parametrize("most", [1, 2, 9])
def test_rows_of_any_resolution_are_those_that_the_model_packs(most):
    from transformers import LlavaOnevisionConfig
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 2}
    config = LlavaOnevisionConfig(vision_config=vision, image_grid_pinpoints=RESOLUTIONS)
    with torch.device("meta"):
        model = LlavaOnevisionModel(config)
    call = AnyResolutionTiles((3, 8, 8), 4, tuple(map(tuple, RESOLUTIONS)), most)
    draw = np.random.default_rng(0)
    for height, width in [*SIZES, *(10 ** draw.uniform(0.3, 3.5, (60, 2))).astype(int).tolist()]:
        extent = call.extent(height, width)
        call.check(extent)
        rows = torch.zeros(extent[0], 16, 1)
        packed, _ = model.pack_image_features([rows], [(height, width)], torch.zeros(1), f"anyres_max_{most}")
        assert call.units(extent) == len(packed[0]), (height, width)


def test_tiles_that_do_not_suit_the_size_are_refused():
    call = AnyResolutionTiles((3, 8, 8), 4, ((8, 16), (16, 16)), 9)
    with pytest.raises(SampleError, match=r"an image of 16 x 16 pixels must be cut into 5 tiles .*, got 3"):
        call.check((3, 3, 8, 8, 16, 16))
    with pytest.raises(SampleError, match=r"with the height and width of the image before it was cut as their size"):
        call.check((3, 3, 8, 8))
