"""A directory as users have it, with tokenizer, image processor and chat template, and a folder of images: one key."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from hetmesh.cli import main
from hetmesh.recipe.recipe import load_recipe
from hetmesh.testing import tiny_vlms
from hetmesh.training.describe import describe

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} <|im_end|> {% endfor %}"
)
WORDS = ["<pad>", "<|image_pad|>", "<unk>", "<|im_end|>", "user", "assistant", "what", "is", "this", "a", "cat", "dog"]
WORDS += [f"w{i}" for i in range(len(WORDS), 43)] + ["<|vision_start|>", "<|vision_end|>"]


@pytest.fixture
def recipe(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = tiny_vlms.save("qwen3_vl", tmp_path)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<|image_pad|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=special
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=2, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 32, "longest_edge": 200}
    ).save_pretrained(folder)
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
