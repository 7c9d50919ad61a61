"""A directory as users have it, with tokenizer, image processor and chat template, and a folder of images: one key."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from tiny_directory import WORDS, save_directory

from hetmesh.cli import main
from hetmesh.recipe.recipe import load_recipe
from hetmesh.testing import tiny_vlms
from hetmesh.training.describe import describe


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


@pytest.mark.slow
def test_a_directory_and_a_folder_of_images_train(recipe, capsys):
    source, _, _ = describe(load_recipe(recipe))
    assert source.placeholders == {"image": tiny_vlms.IMAGE}
    meta = source.meta(2)  # two images of other sizes, each with the tokens that the template puts around it
    words = [WORDS[i] for i in source.load(2).tokens.tolist()]
    assert words[:7] == ["user", *["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"] * 2]
    assert [item.shape for item in meta.media] == [(3, 12, 16), (3, 12, 12)]

    assert main(["train", str(recipe)]) == 0
    assert "weights: logits differ from transformers' own by at most" in capsys.readouterr().out
    metrics = (recipe.parent / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) >= 2
