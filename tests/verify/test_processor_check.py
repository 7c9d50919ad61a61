"""The first samples of the data are compared with the directory's own processor: what differs is named."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image
from transformers import LlavaProcessor

from hetmesh.cli import main
from hetmesh.data.chat import Chat
from hetmesh.data.preparation import Preparation
from hetmesh.errors import SelfCheckError
from hetmesh.models.split.processor import processor_at
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.verify.processor_check import check_processor
from hetmesh.verify.self_check_process import needs_self_check, record
from support.media_files import write_video
from support.often import some
from surveying.processor_forward import tiny_directory


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    tiny_directory("llava", "LlavaForConditionalGeneration", path)
    return path


@pytest.fixture
def talks(tmp_path):
    draw, lines = np.random.default_rng(0), []
    for i, sizes in enumerate(([(20, 30)], [], [(9, 40), (12, 12)])):
        parts = [{"type": "text", "text": "what is this"}]
        for j, size in enumerate(sizes):
            exif = Image.Exif()
            exif[0x0112] = 6
            pixels = draw.integers(0, 256, (*size, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{i}{j}.png", exif=exif)
            parts.append({"type": "image", "image": f"{i}{j}.png"})
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
        lines.append(json.dumps({"id": f"talk {i}", "messages": turns}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    return tmp_path / "talks.jsonl"


def recipe_of(path, talks, more=""):
    return parse_recipe(
        f"[model]\nhf_path = '{path}'\n[data.options]\npath = '{talks}'\n{more}\n"
        f"[training]\nlocal_batch_size = 1\n[job]\ndump_folder = '{talks.parent / 'out'}'\n"
    )


def test_the_first_samples_equal_those_of_transformers_own_processor(llava, talks):
    (line,) = check_processor(resolve(recipe_of(llava, talks)))
    assert line == ("data: tokens and tensors of 3 of the first 3 samples equal those of transformers' own processor")


def fault_pixels(monkeypatch):
    made = Preparation.load

    def other(self, *args):
        meta, sample = made(self, *args)
        for unit in sample.units.values():
            unit["pixel_values"].flatten()[7] += 0.25
        return meta, sample

    monkeypatch.setattr(Preparation, "load", other)


def fault_template(monkeypatch):
    monkeypatch.setattr(Chat, "_apply", lambda self, *given, made=Chat._apply: "w20 " + made(self, *given))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (fault_pixels, r"sample 'talk 0': pixel_values: 1 of \d+ differ, first \[0, 0, 0, 7\]: .* LlavaProcessor"),
        (fault_template, r"sample 'talk 0': input_ids: token 0 of \d+ is 'w', and '<.im_start.>' of \d+ by .* Llava"),
    ],
)
def test_what_differs_is_named_with_its_sample_and_key(llava, talks, monkeypatch, fault, says):
    fault(monkeypatch)
    with pytest.raises(SelfCheckError, match=says):
        check_processor(resolve(recipe_of(llava, talks)))


def test_a_form_of_the_recipe_is_compared_with_what_transformers_makes_of_it(llava, talks):
    form = "{% for m in messages %}{% for p in m.content %}{{ p.text or 'IMAGE' }} {% endfor %}{% endfor %}"
    form = form.replace("IMAGE", processor_at(llava, "key").written("image"))
    (line,) = check_processor(resolve(recipe_of(llava, talks, f'chat_template = "{form}"')))
    assert line.startswith("data: tokens and tensors of 3 of")


@pytest.mark.parametrize("options", some(("num_frames = 4",), ("num_frames = 4", "fps = 4", "do_sample_frames = true")))
def test_videos_are_compared_with_what_transformers_samples(directory, tmp_path, options):
    """Of a directory with a rate of its own, which transformers refuses beside `num_frames`: 0 were once compared."""
    write_video(tmp_path / "a.mp4", count=24)
    parts = [{"type": "video", "path": "a.mp4"}, {"type": "text", "text": "Rain?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"id": "x", "messages": turns}))
    more = f"processor_options = {{ {options} }}\n[modules.vision]\nmedia = 'image+video'"
    (line,) = check_processor(resolve(recipe_of(directory("qwen3_vl"), tmp_path / "talks.jsonl", more)))
    assert line == "data: tokens and tensors of 1 of the first 1 sample equal those of transformers' own processor"


def test_what_is_not_compared_is_said_and_what_transformers_refuses_is_an_error(llava, talks, monkeypatch):
    resolved = resolve(recipe_of(llava, talks))
    (talks.parent / "00.png").write_bytes(b"not found")
    (line,) = check_processor(resolved)
    assert "of 2 of the first 3 samples equal" in line
    assert re.search(r"; not compared: sample 'talk 0': cannot read .*00.png: it is no image that Pillow knows$", line)

    def refused(*args, **kwargs):
        raise ValueError("no such tile")

    monkeypatch.setattr(LlavaProcessor, "apply_chat_template", refused)
    with pytest.raises(SelfCheckError, match="'talk 1': transformers' LlavaProcessor cannot take it: no such tile"):
        check_processor(resolved)


def test_a_recipe_that_names_a_tokenizer_is_not_compared_which_is_said(llava, talks):
    more = f"tokenizer = '{llava}'\nimage_processor = '{llava}'\nplaceholders = {{ image = 'IMAGE' }}"
    more = more.replace("IMAGE", processor_at(llava, "key").written("image"))
    (line,) = check_processor(resolve(recipe_of(llava, talks, more)))
    assert line == "data: nothing was compared with transformers' own processor: data.options name a tokenizer"


def test_check_weights_and_the_first_start_compare_them(llava, talks, capsys, monkeypatch):
    recipe = recipe_of(llava, talks)
    record(recipe, 0.0)
    assert not needs_self_check(recipe)
    assert needs_self_check(recipe_of(llava, talks, "processor_options = { do_center_crop = false }"))
    file = talks.parent / "recipe.toml"
    file.write_text(
        f"[model]\nhf_path = '{llava}'\n[data.options]\npath = '{talks}'\n[training]\nlocal_batch_size = 1\n"
        f"[job]\ndump_folder = '{talks.parent / 'out'}'\n"
    )
    assert main(["check", str(file), "--weights"]) == 0
    assert "data: tokens and tensors of 3 of the first 3 samples equal those" in capsys.readouterr().out
    fault_template(monkeypatch)
    assert main(["check", str(file), "--weights"]) == 1
    assert "sample 'talk 0': input_ids: token 0" in capsys.readouterr().err
