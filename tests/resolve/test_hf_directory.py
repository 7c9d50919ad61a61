"""A directory as users have it, with tokenizer, image processor and chat template, and a folder of images: one key."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from hetmesh.cli import main
from hetmesh.data.answers import answer_start
from hetmesh.errors import SampleError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from support import tiny_vlms
from support.tiny_directory import WORDS, save_directory


@pytest.fixture
def recipe(tmp_path):
    folder = save_directory("qwen3_vl", tmp_path)
    draw = np.random.default_rng(0)
    lines = []
    for i in range(6):
        Image.fromarray(draw.integers(0, 256, (9 + 2 * i, 14, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        images = [{"type": "image", "image": f"{j}.png"} for j in range(i, min(i + i % 3, 6))]
        asked = [*images, {"type": "text", "text": "what is this"}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "a cat"}]
        lines.append(json.dumps({"id": str(i), "messages": turns}))
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    file = tmp_path / "recipe.toml"
    file.write_text(f"""
[model]
hf_path = "{folder}"
[data.options]
path = "{tmp_path}/talks.jsonl"
[job]
dump_folder = "{tmp_path}/out"
[training]
local_batch_size = 3
steps = 2
""")
    return file


@pytest.mark.exhaustive  # test_starter.py trains one by default
@pytest.mark.slow
def test_a_directory_and_a_folder_of_images_train(recipe, capsys):
    resolved = resolve(load_recipe(recipe))
    source = resolved.source
    assert source.placeholders == {"image": tiny_vlms.IMAGE}
    meta = source.meta(2)  # two images of other sizes, each with the tokens that the template puts around it
    words = [WORDS[i] for i in source.load(2).tokens.tolist()]
    pads = [["<|vision_start|>", *["<|image_pad|>"] * rows, "<|vision_end|>"] for rows in (12, 9)]
    assert words[:26] == ["user", *pads[0], *pads[1]]
    assert [item.rows for item in meta.media] == [12, 9]

    assert main(["train", str(recipe)]) == 0
    assert "weights: logits differ from transformers' own by at most" in capsys.readouterr().out
    metrics = (recipe.parent / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) >= 2


@pytest.mark.exhaustive  # test_starter.py has it by the commands of README
@pytest.mark.slow
def test_a_run_of_a_directory_is_asked_and_exported(recipe, capsys):
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    folder = recipe.parent
    resolved = resolve(load_recipe(recipe))
    source = resolved.source
    image = ("image", folder / "1.png")
    meta, asked = source.prompt("what is this", [image])
    like, start = source.load(1), answer_start(source.meta(1))
    assert asked.tokens.tolist() == like.tokens[:start].tolist()  # token by token what training has before an answer
    pixels, grid = (asked.units["image"][key] for key in ("pixel_values", "image_grid_thw"))
    assert torch.equal(pixels, like.units["image"]["pixel_values"])
    assert meta.media == source.meta(1).media
    assert source.end_ids == (WORDS.index("<|im_end|>"),)
    marked = source.prompt("what <image> is <image> this", [image, image])[1].tokens.tolist()
    assert [WORDS[i] for i in marked[:3]] == ["user", "what", "<|vision_start|>"]
    with pytest.raises(SampleError, match="more marks in the text than files"):
        source.prompt("<image> or <image>", [image])

    keys = ["--checkpoint.enable", "true", "--training.steps", "1"]
    assert main(["train", str(recipe), "--no-self-check", *keys]) == 0
    assert "ask it: hetmesh generate" in capsys.readouterr().out
    question = ["what is this", "--image", str(folder / "1.png"), "--max-new-tokens", "5"]
    assert main(["generate", str(recipe), *question]) == 0  # the weights that it starts from
    assert main(["generate", str(folder / "out"), *question]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert main(["export", str(folder / "out"), str(folder / "hf")]) == 0

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    ids = asked.tokens.tolist()
    given = asked.tokens[None]
    out = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        pixel_values=pixels,
        image_grid_thw=grid,
        mm_token_type_ids=(given == tiny_vlms.IMAGE).long(),
        do_sample=False,
        max_new_tokens=5,
        eos_token_id=source.end_ids[0],
        suppress_tokens=[tiny_vlms.IMAGE],
    )
    said_there = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).strip()
    assert said == said_there


@pytest.mark.slow
def test_questions_that_cannot_be_asked(recipe, capsys):
    def says(*arguments):
        assert main(["generate", *map(str, arguments)]) in (1, 2)
        return capsys.readouterr().err

    assert "there is no such file" in says(recipe, "what", "--image", "nowhere.png")
    assert "give a question, or --sample N" in says(recipe)
    assert "have no validation split" in says(recipe, "--sample", 0)
    assert "validation.enable = false" in says(recipe, "--sample", 0, "--validation.enable", "false")
    assert "--max-new-tokens 0: must be at least 1" in says(recipe, "what", "--max-new-tokens", 0)
    assert "its text contains" in says(recipe, "what is <|image_pad|>")


def test_check_says_what_to_think_of_it_last_and_names_parameters_when_asked(recipe, capsys):
    assert main(["check", str(recipe)]) == 0
    *described, last = capsys.readouterr().out.splitlines()
    assert last == "ok"
    notes = [line.startswith("note: ") for line in described]
    assert any(notes)
    assert described.index(f"[model] hf_path = '{recipe.parent}/qwen3_vl' stands for:") < notes.index(True)
    assert all(line.startswith(("note: ", "  ")) for line in described[notes.index(True) :])
    assert not any("embed_tokens" in line for line in described)
    assert main(["check", str(recipe), "--parameters"]) == 0
    named = capsys.readouterr().out.splitlines()
    assert "  model.language_model.layers.*.self_attn.q_proj.weight  (3)" in named
    assert any(line.startswith("vision owns ") for line in named)
    assert named[-1 - sum(notes) :] == [*described, last][-1 - sum(notes) :]


def test_a_directory_whose_tower_is_refused_is_not_asked_for_a_template(recipe, capsys):
    folder = recipe.parent / "qwen3_vl"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    assert main(["check", str(recipe)]) == 2
    assert "there is no chat template in it; write the whole form" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["encoder_layerdrop"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["check", str(recipe)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "vision_config.encoder_layerdrop = 0.1; every layer runs" in line
