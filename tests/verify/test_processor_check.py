"""The first samples of the data are compared with the directory's own processor: what differs is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from hetmesh.cli import main
from hetmesh.data.chat import Chat
from hetmesh.data.images.image_processor import ImageProcessor
from hetmesh.errors import SelfCheckError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.verify import processor_check
from hetmesh.verify.processor_check import check_processor
from hetmesh.verify.self_check_process import needs_self_check, record
from support import tiny_vlms
from support.tiny_directory import TEMPLATE, WORDS, save_directory


def save_llava(folder):
    """A LLaVA as users have it, with the processor that transformers saves."""
    from transformers import AutoTokenizer, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    path = tiny_vlms.save("llava", folder)
    other = save_directory("qwen2_5_vl", folder / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    images = CLIPImageProcessorPil(size={"shortest_edge": 10}, crop_size={"height": 8, "width": 8})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=2,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token=WORDS[1],
        num_additional_image_tokens=1,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save_llava(tmp_path_factory.mktemp("llava"))


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
    assert line == "data: tokens and pixels of the first 3 samples equal those of transformers' own processor"


def fault_mean(monkeypatch):
    made = ImageProcessor.from_directory

    def other(*args, **kwargs):
        processor = made(*args, **kwargs)
        object.__setattr__(processor, "mean", (0.4, 0.4, 0.4))
        return processor

    monkeypatch.setattr(ImageProcessor, "from_directory", other)


def fault_template(monkeypatch):
    monkeypatch.setattr(
        Chat, "_apply", lambda self, turns, asks=False, made=Chat._apply: "w20 " + made(self, turns, asks)
    )


def fault_rows(monkeypatch):
    made = processor_check.placeholder_rows
    rows = {"image": lambda extent: 17}
    monkeypatch.setattr(processor_check, "placeholder_rows", lambda *given: {**made(*given), **rows})


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            fault_mean,
            r"sample 'talk 0': pixel_values: .* of 192 differ by more than a grey level .* CLIPImageProcessor",
        ),
        (fault_template, r"sample 'talk 0': input_ids: token 0 of 28 is 'w20', and 'user' of 27 by .* LlavaProcessor"),
        (fault_rows, r"sample 'talk 0': input_ids: token 21 of 28 is .*image_pad.*, and .*vision_end.* of 27 by"),
    ],
)
def test_what_differs_is_named_with_its_sample_and_key(llava, talks, monkeypatch, fault, says):
    fault(monkeypatch)
    with pytest.raises(SelfCheckError, match=says):
        check_processor(resolve(recipe_of(llava, talks)))


def test_a_processor_that_does_not_load_is_said_and_pixels_are_compared_all_the_same(tmp_path, talks, monkeypatch):
    path = save_directory("qwen2_5_vl", tmp_path)
    (line,) = check_processor(resolve(recipe_of(path, talks)))
    assert line.startswith(
        "data: pixels of the first 3 samples equal those of transformers' own processor; prompts were"
    )
    assert "not: transformers' own does not load here" in line
    fault_mean(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"sample 'talk 0': pixel_values: .* Qwen2VLImageProcessor"):
        check_processor(resolve(recipe_of(path, talks)))


def test_a_form_of_the_recipe_is_not_compared_which_is_said(llava, talks):
    form = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<|image_pad|>' }} {% endfor %}{% endfor %}"
    (line,) = check_processor(resolve(recipe_of(llava, talks, f'chat_template = "{form}"')))
    assert line.startswith("data: pixels of")
    assert "prompts were not: data.options.chat_template is the recipe's" in line
    assert check_processor(resolve(parse_recipe(tiny_vlms.recipe_text(llava)))) == []


def test_check_weights_and_the_first_start_compare_them(llava, talks, capsys, monkeypatch):
    recipe = recipe_of(llava, talks)
    record(recipe, 0.0)
    assert not needs_self_check(recipe)
    assert needs_self_check(recipe_of(llava, talks, "special_tokens = false"))
    file = talks.parent / "recipe.toml"
    file.write_text(
        f"[model]\nhf_path = '{llava}'\n[data.options]\npath = '{talks}'\n[training]\nlocal_batch_size = 1\n"
        f"[job]\ndump_folder = '{talks.parent / 'out'}'\n"
    )
    assert main(["check", str(file), "--weights"]) == 0
    assert "data: tokens and pixels of the first 3 samples equal those" in capsys.readouterr().out
    fault_template(monkeypatch)
    assert main(["check", str(file), "--weights"]) == 1
    assert "sample 'talk 0': input_ids: token 0" in capsys.readouterr().err
