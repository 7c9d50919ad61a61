"""Images are those that transformers makes of the same files and directory, or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from test_data_conversations import image, root, source, talk  # noqa: F401

from hetmesh.data import make_source
from hetmesh.data.digits import read_digit
from hetmesh.data.images.image_processor import ImageProcessor
from hetmesh.data.metadata_index import build_index
from hetmesh.errors import RecipeError, SampleError
from hetmesh.models.split.patch_order import PatchOrder

QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 2, "min_pixels": 32, "max_pixels": 4000}
ORIENTATION = 0x0112


def picture(height, width, channels=3):
    draw = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(draw.integers(0, 256, (height, width, channels), dtype=np.uint8))


def directory(folder, settings, **files):
    folder.mkdir(exist_ok=True)
    for name, value in {"preprocessor_config": settings, **files}.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def theirs(folder):
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend="pil")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_images_are_turned_as_their_exif_data_say(root, tmp_path, suffix):  # noqa: F811
    """Their sizes too, in an index and in a question of `hetmesh generate`."""
    plain = directory(tmp_path / "plain", {"do_resize": False, "do_rescale": False})
    records, files = [], []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        files.append(tmp_path / f"{orientation}.{suffix}")
        picture(20, 30).save(files[-1], exif=exif)
        records.append(talk([image(files[-1].name)], "a cat"))
    given = {"image_processor": str(plain), "media_folder": str(tmp_path)}
    data = source(root, *records, **given)
    expected = [np.asarray(theirs_load(file)).transpose(2, 0, 1) for file in files]
    assert {each.shape for each in expected} == {(3, 20, 30), (3, 30, 20)}
    build_index(data)
    indexed = make_source("conversations", path=str(root / "data.jsonl"), tokenizer=str(root / "tokenizer"), **given)
    data.index_path.unlink()
    for i, pixels in enumerate(expected):
        asked = data.prompt("what is this", [("image", files[i])])
        samples = [(data.meta(i), data.load(i)), (indexed.meta(i), indexed.load(i)), asked]
        for meta, sample in samples:
            assert meta.media[0].shape == pixels.shape
            assert np.array_equal(sample.media["image"][0].numpy(), pixels)


def theirs_load(file):
    from transformers.image_utils import load_image

    return load_image(str(file))


def test_a_digit_in_a_file_is_turned_too(tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    ink = np.full((16, 16), 255, np.uint8)
    ink[4:6, 2:14] = 0  # lies
    Image.fromarray(ink).save(tmp_path / "lies.png", exif=exif)
    Image.fromarray(np.rot90(ink, -1)).save(tmp_path / "stands.png")
    assert torch.equal(read_digit(tmp_path / "lies.png"), read_digit(tmp_path / "stands.png"))


def test_an_orientation_behind_the_pixels_of_a_png_is_refused(root, tmp_path):  # noqa: F811
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    picture(20, 30).save(tmp_path / "x.png", exif=exif)
    data = (tmp_path / "x.png").read_bytes()
    at = data.index(b"eXIf") - 4
    size = int.from_bytes(data[at : at + 4], "big") + 12
    end = len(data) - 12  # IEND
    (tmp_path / "x.png").write_bytes(data[:at] + data[at + size : end] + data[at : at + size] + data[end:])
    assert theirs_load(tmp_path / "x.png").size == (20, 30)
    talks = source(root, talk([image("x.png")], "a cat"), media_folder=str(tmp_path))
    with pytest.raises(SampleError, match=r"x.png: its EXIF orientation stands behind its pixels"):
        talks.load(0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_images_are_put_on_what_transformers_puts_them_on(tmp_path, mode):
    folder = directory(tmp_path / "clip", {"image_processor_type": "CLIPImageProcessor", "size": 8, "crop_size": 8})
    if mode == "P":
        picture(9, 9).quantize(16).save(tmp_path / "x.png", transparency=3)
    elif mode == "RGB":  # one colour stands for none
        shades = Image.fromarray((np.asarray(picture(9, 9)) // 128 * 255).astype(np.uint8))
        shades.save(tmp_path / "x.png", transparency=(0, 255, 0))
    else:
        picture(9, 9, len(mode)).convert(mode).save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as opened:
        expected = theirs(folder)(images=[opened], return_tensors="pt")["pixel_values"][0]
        mixed = ImageProcessor.from_directory(folder, "key")(opened)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-5)
    directory(folder, {"image_processor_type": "ViTImageProcessor"})
    with pytest.raises(ValueError, match=r"it is transparent, and its directory's image processor does not convert"):
        ImageProcessor.from_directory(folder, "key")(Image.open(tmp_path / "x.png"))


CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 9}, "crop_size": 8}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 6, "width": 7}}


@pytest.mark.parametrize(
    ("old", "combined"),
    [
        (CLIP, {"image_processor": SIGLIP, "processor_class": "LlavaProcessor"}),
        (None, {"image_processor": SIGLIP}),
        (CLIP, {"image_processor": None, "processor_class": "LlavaProcessor"}),
        (CLIP, {"image_seq_len": 4}),
        (CLIP, None),
    ],
    ids=["nested wins", "nested alone", "nested is null", "nothing nested", "old alone"],
)
def test_the_file_that_holds_is_the_one_that_transformers_takes(tmp_path, old, combined):
    folder = directory(tmp_path / "x", old, processor_config=combined)
    expected = theirs(folder)(images=[picture(20, 30)], return_tensors="pt")["pixel_values"][0]
    ours = ImageProcessor.from_directory(folder, "key")
    assert ours.shape(30, 20) == expected.shape
    torch.testing.assert_close(ours(picture(20, 30)), expected, rtol=0, atol=1e-5)


SMALL = [  # keys with which images stay small, where a class knows them
    {},
    {"size": {"height": 12, "width": 10}, "crop_size": {"height": 8, "width": 8}},
    {"size": {"shortest_edge": 12}, "crop_size": {"height": 8, "width": 8}},
    {"size": 12, "do_normalize": False},
    {"image_mean": [0.1, 0.2, 0.3], "size": None, "resample": None},
]
FOLLOWED = ["Blip", "CLIP", "DeepseekVL", "Gemma3", "Glm4v", "GotOcr2", "Idefics3", "Janus", "LlavaOnevision"]
FOLLOWED += ["Pixtral", "Qwen2VL", "Siglip", "Siglip2", "SmolVLM", "ViT"]


def compared(folder, kind):
    """How many of `SMALL` are followed; the others are refused, or transformers can do nothing with them."""
    splits = kind.startswith(("Idefics3", "SmolVLM"))
    followed = 0
    for more in SMALL:
        directory(folder, {"image_processor_type": kind, **more})
        try:
            mine = ImageProcessor.from_directory(folder, "key", tiles=False if splits else None)(picture(20, 30))
            processor = theirs(folder)
            call = {"do_image_splitting": False} if splits else {}
            given = processor(images=[picture(20, 30)], return_tensors="pt", **call)
        except (RecipeError, ValueError, TypeError):
            continue
        expected = given["pixel_values"]
        if "image_grid_thw" in given:
            mine = PatchOrder().cut(mine, processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        elif splits:  # one tile, padded with none
            expected = expected[0, 0]
        close = mine.numel() == expected.numel() and (mine - expected.reshape(mine.shape)).abs().max() < 1e-5
        assert close, f"{kind}: {more}"
        followed += 1
    return followed


def test_keys_that_a_file_leaves_out_are_those_of_the_class_or_it_is_refused(tmp_path):
    followed = {name: compared(tmp_path / "x", f"{name}ImageProcessor") for name in FOLLOWED}
    refused = {name for name, count in followed.items() if not count}
    assert refused == {"DeepseekVL", "Janus", "Pixtral", "Siglip2"}


@pytest.mark.slow
def test_every_image_processor_of_transformers_is_followed_or_refused(tmp_path):
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names = {each for found in IMAGE_PROCESSOR_MAPPING_NAMES.values() for each in found.values() if each}
    kinds = sorted({name.removesuffix("Pil") for name in names})
    followed = [kind for kind in kinds if compared(tmp_path / "x", kind)]
    assert len(kinds) > 100
    assert 10 < len(followed) < 40


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"image_processor_type": "JanusImageProcessor"}, r"asks for \['do_pad'\]"),
        ({"image_processor_type": "DeepseekVLImageProcessor"}, r"asks for \['do_pad'\]"),
        ({"image_processor_type": "JanusImageProcessor", "do_pad": False}, r"Janus.* has steps of its own \(.*resize"),
        ({"image_processor_type": "NewImageProcessor"}, r"transformers has no image processor 'NewImageProcessor'"),
        ({"image_processor_type": "Molmo2ImageProcessor"}, r"cannot be read without the packages that it needs"),
    ],
)
def test_what_a_class_does_by_default_and_what_is_unknown_is_refused(tmp_path, config, says):
    with pytest.raises(RecipeError, match=says):
        ImageProcessor.from_directory(directory(tmp_path / "x", config), "key")


def test_the_class_of_a_file_that_names_none_is_that_of_its_model(tmp_path):
    folder = directory(tmp_path / "x", {"size": {"height": 6, "width": 7}}, config={"model_type": "paligemma"})
    expected = theirs(folder)(images=[picture(20, 30)], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(
        ImageProcessor.from_directory(folder, "key")(picture(20, 30)), expected, atol=1e-5, rtol=0
    )


def test_tiles_with_text_between_them_that_nobody_here_writes_are_refused(root, tmp_path):  # noqa: F811
    """A chat template of the recipe's own once stood for one tile, where there were several."""
    config = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 8, "width": 8}}
    folder = directory(tmp_path / "x", {**config, "crop_to_patches": True, "processor_class": "AyaVisionProcessor"})
    picture(16, 32).save(tmp_path / "wide.png")
    given = {"image_processor": str(folder), "media_folder": str(tmp_path), "chat_template": "{{ messages }}"}
    says = r"cut into tiles, and what AyaVisionProcessor writes between these .* image_tiles = false"
    for tiles in (None, True):
        with pytest.raises(RecipeError, match=says):
            source(root, talk([image("wide.png")], "a cat"), image_tiles=tiles, **given)
    directory(folder, {**config, "processor_class": "AyaVisionProcessor"})  # which cuts them all the same
    with pytest.raises(RecipeError, match=says):
        ImageProcessor.from_directory(folder, "key")
    assert ImageProcessor.from_directory(folder, "key", tiles=False)(picture(16, 32)).shape == (3, 8, 8)
