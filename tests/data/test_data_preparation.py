"""Conversations that a directory's own processor prepares equal what its `apply_chat_template` makes of them."""

from __future__ import annotations

import json
import re
import shutil
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hetmesh.cli import main
from hetmesh.data import check_meta, make_source
from hetmesh.data.metadata_index import build_index
from hetmesh.errors import RecipeError, SampleError
from hetmesh.models.split.processor import Processor
from support.media_files import write_video
from support.tiny_processors import change

ORIENTATION = 0x0112
SIZES = {"a.png": (64, 96), "b.png": (150, 75), "c.png": (40, 40)}
"""Heights and widths of the images in `media`."""
CUSTOM = (
    "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Writes other words around turns and items than the directories do."""


def picture(height, width):
    draw = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for name, size in SIZES.items():
        picture(*size).save(folder / name)
    return folder


def asked(*items, words="what is it?"):
    """Turns with images and recordings, of two answers."""
    parts = [{"type": "audio" if str(name).endswith("wav") else "image", "path": str(name)} for name in items]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": words}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat, <i>so</i> small."}]},
        {"role": "user", "content": [{"type": "text", "text": "Is it grey?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Grau, \N{SNOWMAN}!"}]},
    ]


ANSWERS = ["A cat, <i>so</i> small.", "Grau, \N{SNOWMAN}!"]


def source_of(directory, folder, *conversations, **options):
    file = folder / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"id": f"talk {i}", "messages": t}) for i, t in enumerate(conversations)))
    return make_source("conversations", path=str(file), processor=str(directory), **options)


def own_of(directory):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory)


def opened(part):
    """A part with its file as transformers opens it (where torchvision's decoders do not load, which it prefers)."""
    from transformers.image_utils import load_image

    if part["type"] == "text":
        return part
    if part["type"] == "image":
        return {"type": "image", "image": load_image(part["path"])}
    with wave.open(part["path"]) as file:
        return {"type": "audio", "audio": np.frombuffer(file.readframes(-1), np.int16).astype(np.float32) / 32768}


def by_transformers(directory, turns, template=None, **options):
    """What transformers makes of the turns."""
    return own_of(directory).apply_chat_template(
        [{**turn, "content": [opened(part) for part in turn["content"]]} for turn in turns],
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=options,
    )


def assert_equal(source, index, made, answers, keys):
    """Sample `index` has the tokens and the tensors (`keys`) of `made`; its targets are the answers, and its metadata
    come from headers alone."""
    meta, sample = source.meta(index), source.load(index)
    check_meta(meta)
    assert sample.tokens.tolist() == made["input_ids"][0].tolist()
    assert meta.tokens == len(sample.tokens)
    units = {key: value for unit in sample.units.values() for key, value in unit.items()}
    assert set(units) == set(keys)
    for key, value in units.items():
        assert torch.equal(value, torch.as_tensor(made[key])), key
    decode = source.preparation.processor.tokenizer.decode
    said = [decode(sample.tokens[start:stop]) for start, stop in meta.targets]
    assert len(said) == len(answers)
    for text, answer in zip(said, answers, strict=True):
        assert text.removeprefix(" ").startswith(answer)
        assert not text.replace(answer, "", 1).strip().removeprefix("<|im_end|>").removeprefix("<|eos|>")
    tokens = set(source.placeholders.values())
    at = {i for item in meta.media for start, rows in item.spans for i in range(start, start + rows)}
    assert at == {i for i, token in enumerate(sample.tokens.tolist()) if token in tokens}
    kinds = {item.name for item in meta.media}
    assert sample.unit_rows == {kind: sum(item.rows for item in meta.media if item.name == kind) for kind in kinds}
    return meta, sample


FAMILIES = {
    "llava": {"pixel_values"},
    "qwen2_5_vl": {"pixel_values", "image_grid_thw"},
    "gemma3": {"pixel_values"},
    "idefics3": {"pixel_values", "pixel_attention_mask"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_one_and_several_images_equal_the_processors(processors, media, family):
    turns = [asked(), asked(media / "a.png"), asked(*(media / name for name in SIZES))]
    source = source_of(processors(family), media, *turns)
    for i, each in enumerate(turns):
        made = by_transformers(processors(family), each)
        meta, _ = assert_equal(source, i, made, ANSWERS, FAMILIES[family] if i else ())
        assert len(meta.media) == (0, 1, 3)[i]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llava_onevision", {"pixel_values", "image_sizes", "batch_num_images"}),
        ("minicpmv4_6", {"pixel_values", "target_sizes"}),
    ],
)
def test_an_image_among_others_is_cut_as_the_processor_cuts_it(processors, media, family, keys):
    """Their processors look at all images of a sample before they cut one into tiles."""
    turns = [asked(media / "b.png"), asked(*(media / name for name in SIZES))]
    source = source_of(processors(family), media, *turns)
    rows = []
    for i, each in enumerate(turns):
        meta, _ = assert_equal(source, i, by_transformers(processors(family), each), ANSWERS, keys)
        rows.append([item.rows for item in meta.media])
    assert len(rows[1]) == 3
    if family == "llava_onevision":
        assert rows[1][1] < rows[0][0]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_images_are_turned_as_their_exif_data_say(processors, tmp_path, suffix):
    """Their sizes too, in headers, in an index and in a question of `hetmesh generate`."""
    files = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        files.append(tmp_path / f"{orientation}.{suffix}")
        picture(40, 90).save(files[-1], exif=exif)
    directory = processors("qwen2_5_vl")
    turns = [asked(file) for file in files]
    source = source_of(directory, tmp_path, *turns)
    build_index(source)
    indexed = make_source("conversations", path=str(tmp_path / "talks.jsonl"), processor=str(directory))
    grids = set()
    for i, each in enumerate(turns):
        meta, sample = assert_equal(
            source, i, by_transformers(directory, each), ANSWERS, {"pixel_values", "image_grid_thw"}
        )
        question, loaded = source.prompt("what is it?", [("image", files[i])])
        assert indexed.meta(i) == meta
        assert question.media == meta.media
        assert torch.equal(loaded.units["image"]["pixel_values"], sample.units["image"]["pixel_values"])
        grids.add(tuple(sample.units["image"]["image_grid_thw"][0].tolist()))
    assert len(grids) == 2


def test_an_orientation_behind_the_pixels_of_a_png_is_refused(processors, tmp_path):
    """No header shows it, so the number of rows would be another."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    picture(40, 90).save(tmp_path / "x.png", exif=exif)
    data = (tmp_path / "x.png").read_bytes()
    at = data.index(b"eXIf") - 4
    size = int.from_bytes(data[at : at + 4], "big") + 12
    end = len(data) - 12  # IEND
    (tmp_path / "x.png").write_bytes(data[:at] + data[at + size : end] + data[at : at + size] + data[end:])
    assert opened({"type": "image", "path": str(tmp_path / "x.png")})["image"].size == (40, 90)
    source = source_of(processors("llava"), tmp_path, asked(tmp_path / "x.png"))
    with pytest.raises(SampleError, match=r"sample 'talk 0': .*x.png: its EXIF orientation stands behind its pixels"):
        source.load(0)


def copied(processors, name, tmp_path):
    return shutil.copytree(processors(name), tmp_path / name)


def test_a_processor_config_holds_where_an_older_file_lies_beside_it(processors, media, tmp_path):
    directory = copied(processors, "llava", tmp_path)
    nested = json.loads((directory / "processor_config.json").read_text())["image_processor"]
    older = {**nested, "image_mean": [0.1, 0.2, 0.3], "crop_size": {"height": 7, "width": 7}}
    (directory / "preprocessor_config.json").write_text(json.dumps(older))
    turns = asked(media / "a.png")
    made = by_transformers(directory, turns)
    assert torch.equal(made["pixel_values"], by_transformers(processors("llava"), turns)["pixel_values"])
    assert_equal(source_of(directory, media, turns), 0, made, ANSWERS, {"pixel_values"})


def test_keys_that_a_file_leaves_out_are_those_of_the_class(processors, media, tmp_path):
    directory = copied(processors, "llava", tmp_path)
    keys = ("image_mean", "image_std", "resample", "do_rescale", "do_normalize", "do_convert_rgb", "do_center_crop")
    change(directory, "processor_config", **{f"image_processor__{key}": None for key in keys})
    turns = asked(media / "a.png")
    assert_equal(source_of(directory, media, turns), 0, by_transformers(directory, turns), ANSWERS, {"pixel_values"})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("processor_class", "transformers finds no processor of texts and media in it but Tokenizers"),
        ("image_processor__image_processor_type", "transformers cannot load its processor: Unrecognized image proc"),
    ],
)
def test_a_processor_of_an_unknown_type_is_refused(processors, media, tmp_path, key, says):
    directory = copied(processors, "llava", tmp_path)
    change(directory, "processor_config", **{key: "NewProcessor"})
    if key == "processor_class":  # where transformers looks next
        change(directory, "tokenizer_config", processor_class="NewProcessor")
    with pytest.raises(RecipeError, match=rf"\[data.options\] processor = '.*llava': {says}"):
        source_of(directory, media, asked(media / "a.png"))


@pytest.mark.parametrize(("family", "tile"), [("idefics3", 4), ("llava_onevision", 16)])
def test_tiles_stand_where_a_template_of_the_recipe_writes_an_image(processors, media, family, tile):
    """A chat template of the recipe's own once stood for one tile, where there were several."""
    template = CUSTOM.replace("<image>", own_of(processors(family)).image_token)
    turns = asked(media / "a.png", media / "b.png")
    source = source_of(processors(family), media, turns, chat_template=template)
    made = by_transformers(processors(family), turns, template)
    meta, _ = assert_equal(source, 0, made, ANSWERS, set(made) - {"input_ids", "attention_mask"})
    assert all(item.rows > tile for item in meta.media)


def test_molmo_2s_processor_writes_the_bos(processors, media):
    turns = asked(media / "a.png")
    made = by_transformers(processors("molmo2"), turns)
    source = source_of(processors("molmo2"), media, turns)
    bos = source.preparation.processor.tokenizer.bos_token_id
    assert made["input_ids"][0].tolist().count(bos) == 1
    keys = {"pixel_values", "image_grids", "image_num_crops", "image_token_pooling"}
    assert_equal(source, 0, made, ANSWERS, keys)


def test_paligemmas_processor_writes_the_bos_and_takes_the_answer_apart(processors, media):
    directory = processors("paligemma")
    turns = asked(media / "a.png")[:2]
    made = own_of(directory)(
        text="<image>what is it?",
        images=[opened(turns[0]["content"][0])["image"]],
        suffix=ANSWERS[0],
        return_tensors="pt",
    )
    source = source_of(directory, media, turns)
    assert source.preparation.processor.tokenizer.bos_token_id in made["input_ids"][0]
    assert_equal(source, 0, made, ANSWERS[:1], {"pixel_values"})
    with pytest.raises(SampleError, match=r"takes a question and its answer, got turns of \['user', .* with weights"):
        source_of(directory, media, [turns[0], {**turns[1], "weight": 0}]).meta(0)


@pytest.mark.parametrize("template", [True, False], ids=["a template in a file", "the template of the class"])
def test_recordings_equal_the_processors(processors, tmp_path, template):
    directory = copied(processors, "qwen2_audio", tmp_path)
    if not template:
        (directory / "chat_template.jinja").unlink()
        assert "helpful assistant" in own_of(directory).chat_template
    draw = np.random.default_rng(0)
    for i, samples in enumerate((8000, 12345)):
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(draw.integers(-9999, 9999, samples, dtype=np.int16).tobytes())
    turns = [asked(tmp_path / "0.wav"), asked(tmp_path / "0.wav", tmp_path / "1.wav")]
    source = source_of(directory, tmp_path, *turns)
    for i, each in enumerate(turns):
        keys = {"input_features", "feature_attention_mask"}
        assert_equal(source, i, by_transformers(directory, each), ANSWERS, keys)


def test_options_reach_the_processor_and_unknown_ones_are_refused(processors, media):
    turns, directory = asked(media / "b.png"), processors("qwen2_5_vl")
    size = {"shortest_edge": 28 * 28, "longest_edge": 5 * 28 * 28}
    source = source_of(directory, media, turns, processor_options={"size": size})
    keys = {"pixel_values", "image_grid_thw"}
    meta, _ = assert_equal(source, 0, by_transformers(directory, turns, size=size), ANSWERS, keys)
    assert meta.media[0].rows < source_of(directory, media, turns).meta(0).media[0].rows
    older = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    assert source_of(directory, media, turns, processor_options=older).meta(0) == meta
    with pytest.raises(RecipeError, match=r"Qwen2_5_VLProcessor takes no tiles; it takes .*size"):
        source_of(directory, media, turns, processor_options={"tiles": 4})
    for wrong in ({"merge_size": 1}, {"patch_size": 7}):
        with pytest.raises(RecipeError, match=r"processor_options (merge|patch)_size = \d: the model says it"):
            source_of(directory, media, turns, processor_options=wrong)


def watched(name):
    """Turns with a video."""
    parts = [{"type": "video", "path": name}, {"type": "text", "text": "Rain?"}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}]


def test_videos_are_sampled_where_an_option_asks_for_it(processors, tmp_path):
    """`do_sample_frames` was once given twice, and videos refused as if the processor took none."""
    from transformers.video_utils import load_video

    clip, directory = write_video(tmp_path / "clip.mp4", count=24), processors("qwen3_vl")
    source = source_of(directory, tmp_path, watched("clip.mp4"), processor_options={"do_sample_frames": True})
    frames, metadata = load_video(str(clip), backend="pyav")
    own, turns = own_of(directory), watched("clip.mp4")
    given = {"videos": [[frames]], "video_metadata": [[metadata]], "do_sample_frames": True}
    made = own(text=[own.apply_chat_template(turns)], return_tensors="pt", **given)
    assert_equal(source, 0, made, ["No."], {"pixel_values_videos", "video_grid_thw"})


def test_videos_that_a_processor_does_not_take_say_why(processors, tmp_path):
    write_video(tmp_path / "short.mp4", count=3)
    cases = {
        "llava": ({}, "it has 'video', but LlavaProcessor takes image$"),
        "internvl": ({"fps": 2}, "InternVLVideoProcessor cannot sample its 3 frames at 10 per second: division by"),
    }
    for family, (options, says) in cases.items():
        with pytest.raises(SampleError, match=says):
            source_of(processors(family), tmp_path, watched("short.mp4"), processor_options=options).meta(0)
    with pytest.raises(RecipeError, match=r"does not take 'image' of size .* with \{'max_pixels': 'few'\}"):
        source_of(processors("qwen2_5_vl"), tmp_path, asked(), processor_options={"max_pixels": "few"})


@pytest.mark.parametrize("items", [(), ("a.png",)])
def test_a_row_token_in_a_text_is_refused(processors, media, items):
    """Gemma 3's templates write another token for an image than those of its rows: a row that no image makes was once
    trained on as text, or left out of an answer."""
    directory = processors("gemma3")
    token = own_of(directory).tokenizer.image_token
    asking, turns = asked(*items, words=f"what is {token}?"), asked(*items)
    turns[1] = {"role": "assistant", "content": f"it is {token}"}
    source = source_of(directory, media, asking, turns)
    for index in range(2):
        for read in (source.meta, source.load):
            with pytest.raises(SampleError, match=f"'talk {index}': its text contains .*, which stands for media"):
                read(index)


def test_files_that_are_no_images_say_so(processors, tmp_path):
    (tmp_path / "a.png").write_text("not found")
    source = source_of(processors("llava"), tmp_path, asked("a.png"), asked("/9j/" * 2000))
    for read in (source.meta, source.load):
        with pytest.raises(SampleError, match=r"cannot read .*a\.png: it is no image that Pillow knows"):
            read(0)
    with pytest.raises(SampleError, match=r"'talk 1': '(/9j/){10}'\.\.\. has 8000 characters, .* as a data URL"):
        source.meta(1)


def test_frames_are_sampled_where_options_say_so(processors, tmp_path):
    """The option once was refused as data without a placeholder, and a short video as a division by zero."""
    turns = asked(write_video(tmp_path / "clip.mp4", "mpeg4"))
    turns[0]["content"][0]["type"] = "video"
    given = {"do_sample_frames": True, "fps": 1}
    few, all_of_it = (
        source_of(processors("internvl"), tmp_path, turns, processor_options=options) for options in (given, {})
    )
    assert 10 * few.meta(0).media[0].rows == all_of_it.meta(0).media[0].rows
    write_video(tmp_path / "clip.mp4", "mpeg4", count=3)
    for ask in (few.meta, few.load):
        with pytest.raises(SampleError, match=r"clip.mp4: InternVLVideoProcessor cannot sample its 3 frames"):
            ask(0)


@pytest.mark.parametrize("nested", [False, True])
def test_how_frames_are_sampled_is_said_once_and_where_the_option_is_ours_or_theirs(processors, tmp_path, nested):
    """Both were once refused video by video, and those of `videos_kwargs` not heeded."""
    turns, directory = watched(write_video(tmp_path / "clip.mp4").name), processors("qwen2_5_vl")
    with_ = lambda **given: {"processor_options": {"videos_kwargs": given} if nested else given}  # noqa: E731
    few = source_of(directory, tmp_path, turns, **with_(num_frames=4))
    assert source_of(directory, tmp_path, turns).meta(0).media[0].rows == 10 * few.meta(0).media[0].rows
    with pytest.raises(RecipeError, match=r"processor_options fps, num_frames: .*mutually exclusive.*; leave one out"):
        source_of(directory, tmp_path, turns, **with_(fps=1, num_frames=4))


def test_a_processor_that_makes_nothing_of_its_first_kind_is_refused(processors, media, tmp_path, monkeypatch):
    def blank(*_):
        raise OSError("no image of that size")

    monkeypatch.setattr(Processor, "blank", blank)
    with pytest.raises(RecipeError, match=r"\[data.options\] processor = .* no image of that size"):
        source_of(copied(processors, "llava", tmp_path), media, asked(media / "a.png"))  # another may be known by now


def test_a_weight_of_0_leaves_a_turn_out_of_the_targets(processors, media):
    turns = asked(media / "a.png")
    source = source_of(processors("llava"), media, [turns[0], {**turns[1], "weight": 0}, *turns[2:]])
    assert_equal(source, 0, by_transformers(processors("llava"), turns), ANSWERS[1:], {"pixel_values"})


def test_a_directory_without_a_template_asks_for_one(processors, media, tmp_path):
    """It once got Vicuna's form without a word."""
    directory = copied(processors, "llava", tmp_path)
    (directory / "chat_template.jinja").unlink()
    says = r"processor = '.*llava': there is no chat template in it; write .* chat_template, with \['.*image.*'\] for"
    with pytest.raises(RecipeError, match=says):
        source_of(directory, media, asked())


def test_a_conversation_of_which_the_template_writes_nothing_has_no_tokens(processors, media):
    """It once was an IndexError."""
    template = "{% for m in messages %}{{ m.content if m.content is string else '' }}{% endfor %}"
    silent = [{"role": "user", "content": ""}]
    source = source_of(processors("qwen2_5_vl"), media, silent, chat_template=template)
    assert len(source.load(0).tokens) == 0
    with pytest.raises(SampleError, match="sample 'talk 0': it has 0 tokens"):
        check_meta(source.meta(0))


def test_the_first_call_is_as_all_others(processors):
    """Names of tensors were once asked for in the middle of it, by another call, whose places it then had."""
    processor = Processor(processors("qwen2_5_vl"), "key", {})
    text, image = f"a {processor.written('image')} b", processor.blank("image", (60, 180))
    first, second = (processor(text, {"image": [image]}) for _ in range(2))
    assert (first.places, first.expanded) == (second.places, second.expanded)
    assert np.array_equal(first.offsets, second.offsets)
    assert [place.kind for place in first.places] == ["image"]


def test_a_processor_that_changes_the_text_is_refused(processors, media, monkeypatch):
    source = source_of(processors("llava"), media, asked())
    processor = source.preparation.processor
    monkeypatch.setattr(source.preparation, "_from_sizes", lambda text, *_: processor(text.upper(), {}))
    with pytest.raises(SampleError, match="LlavaProcessor changes the text that it expands, so where the assistant"):
        source.meta(0)


def test_a_recording_whose_end_the_processor_would_drop_is_refused(processors, tmp_path):
    for name, seconds in (("whole", 2), ("long", 3)):
        with wave.open(str(tmp_path / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(bytes(2 * 16000 * seconds))
    source = source_of(processors("qwen2_audio"), tmp_path, *(asked(tmp_path / f"{n}.wav") for n in ("long", "whole")))
    assert source.meta(1).tokens == len(source.load(1).tokens)
    for ask in (source.meta, source.load):
        with pytest.raises(
            SampleError, match=r"sample 'talk 0': .*long.wav: it lasts 3.0 s, more than the 2.0 s of Qw"
        ):
            ask(0)


def test_modules_that_take_tensors_refuse_what_a_processor_has_prepared(processors, media, tmp_path, capsys):
    source_of(processors("llava"), media, asked(media / "a.png"))
    recipe = (Path(__file__).parents[2] / "recipes" / "digits_single.toml").read_text()
    recipe = re.sub(r"\[validation\]\n[^[]*", "", recipe).replace('source = "digits"', 'source = "conversations"')
    path = tmp_path / "recipe.toml"
    path.write_text(recipe)
    options = f"{{path = '{media / 'talks.jsonl'}', processor = '{processors('llava')}'}}"
    assert main(["check", str(path), f"--data.options={options}"]) == 2
    assert "modules.vision.model = 'siglip' takes tensors of items, and the data's 'image'" in capsys.readouterr().err


def test_without_torchvision_or_pyav_it_is_said_what_to_install(processors, tmp_path, media, monkeypatch):
    """Whatever of the directory would load without them: images of LLaVA would be other pixels than elsewhere."""
    install = r"pip install 'hetmesh\[media\]'"
    llava, qwen, talks = processors("llava"), processors("qwen2_5_vl"), (asked(media / "a.png"),) * 2
    clip = asked(media / "a.png")
    clip[0]["content"] = [{"type": "video", "video": "clip.mp4"}]
    (tmp_path / "clip.mp4").touch()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(
            RecipeError, match=rf"^\[data.options\] processor = .*llava': .* torchvision: .*; {install}"
        ):
            source_of(llava, tmp_path, *talks)
    source = source_of(qwen, tmp_path, *talks, clip, media_folder=[str(tmp_path), str(media)])
    monkeypatch.setitem(sys.modules, "av", None)
    source.check_files(0)
    source.load(0)
    for ask in (source.check_files, source.meta):
        with pytest.raises(RecipeError, match=rf"^\[data.*\] .* video.*, which PyAV reads; it is .*{install}"):
            ask(2)
