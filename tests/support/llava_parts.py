"""recipes/llava_style.toml, and small stand-ins for everything that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetmesh.recipe.recipe import Recipe, parse_recipe

TEMPLATE = Path(__file__).parents[2] / "recipes" / "llava_style.toml"
SIZE = 28
"""Side of an image; 2 x 2 patches of CLIP-L's 14."""
WORDS = ["what", "is", "this", "a", "cat", "dog", "USER:", "ASSISTANT:", "and", "the", "other"]


def save_llava_parts(root: Path) -> Path:
    """Small stand-ins for everything that the template names, with the same file names."""
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    tower = CLIPVisionModel(CLIPVisionConfig(**sizes, num_hidden_layers=3, image_size=SIZE, patch_size=14))
    tower.save_pretrained(root / "clip-vit-large-patch14-336")
    (root / "clip-vit-large-patch14-336" / "preprocessor_config.json").write_text(
        json.dumps(
            {"image_processor_type": "CLIPImageProcessor", "size": SIZE, "crop_size": SIZE, "resample": 3}
            | {"image_mean": [0.5] * 3, "image_std": [0.3] * 3}
        )
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "vocab_size": 40}
    llm = LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_hidden_layers=2, head_dim=8))
    llm.save_pretrained(root / "vicuna-7b-v1.5", max_shard_size="8KB")
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *WORDS])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}  # as Vicuna's
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(root / "vicuna-7b-v1.5")
    (root / "images").mkdir()
    lines = []
    draw = np.random.default_rng(0)
    for i in range(8):
        pixels = draw.integers(0, 256, (20 + 9 * i, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{i}.png")
        asked = [{"type": "image", "image": f"{i}.png"}] * (i % 3) + [{"type": "text", "text": " what is this"}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": ("a cat", "a dog")[i % 2]}]
        if i > 5:
            turns += [{"role": "user", "content": "and the other"}, {"role": "assistant", "content": "the other cat"}]
        lines.append(json.dumps({"id": str(i), "messages": turns}))
    (root / "pretrain.jsonl").write_text("\n".join(lines))
    return root


def filled(folder: Path, *overrides: str, modules: str | None = None) -> Recipe:
    """The template with its paths under `folder`, on two ranks, in fp64; `modules`: other tables of modules."""
    text = TEMPLATE.read_text()
    if modules is not None:
        text = text[: text.index("[modules.vision]")] + modules + text[text.index("[data]") :]
    text = text.replace("/path/to", str(folder)).replace('"0-7"', '"0-1"').replace(" = 8\n", " = 2\n")
    text = text.replace('mixed_precision_param = "bfloat16"', 'dtype = "float64"').replace("= 32 #", "= 2 #")
    return parse_recipe(text, overrides)
