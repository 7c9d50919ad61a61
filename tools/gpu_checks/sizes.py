"""recipes/siglip_qwen3_8b.toml in sizes and layouts of the list: about 1B parameters for a GPU, very few for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetmesh.recipe.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"

LARGE: Mapping[str, object] = {  # SigLIP-so400m and Qwen3-0.6B
    "modules.llm.config.hidden_size": 1024,
    "modules.llm.config.num_hidden_layers": 28,
    "modules.llm.config.num_attention_heads": 16,
    "modules.llm.config.intermediate_size": 3072,
    "activation_checkpoint.mode": '"none"',
    "training.local_batch_size": 4,
    "training.seq_len": 4096,
    "data.options.max_images": 2,
    "data.options.text_tokens": "[64, 512]",
    "checkpoint.enable": "false",
}
SMALL: Mapping[str, object] = {
    **LARGE,
    "modules.vision.config.hidden_size": 192,
    "modules.vision.config.num_hidden_layers": 2,
    "modules.vision.config.num_attention_heads": 4,
    "modules.vision.config.intermediate_size": 768,
    "modules.vision.config.patch_size": 4,
    "modules.vision.config.image_size": 32,
    "modules.llm.config.vocab_size": 1024,
    "modules.llm.config.hidden_size": 192,
    "modules.llm.config.num_hidden_layers": 4,
    "modules.llm.config.num_attention_heads": 4,
    "modules.llm.config.num_key_value_heads": 4,
    "modules.llm.config.head_dim": 48,
    "modules.llm.config.intermediate_size": 528,
    "data.options.vocab_size": 1024,
    "data.options.image_token": 1000,
    "data.options.image_shape": "[3, 32, 32]",
    "data.options.text_tokens": "[64, 256]",
}
ONE_RANK: Mapping[str, object] = {
    "parallelism.vision.ranks": 0,
    "parallelism.vision.data_parallel_replicate_degree": 1,
    "parallelism.llm.ranks": 0,
    "parallelism.llm.data_parallel_shard_degree": 1,
    "parallelism.llm.tensor_parallel_degree": 1,
    "training.global_batch_size": 4,
}
TWO_RANKS: Mapping[str, object] = {
    "parallelism.vision.ranks": '"0-1"',
    "parallelism.vision.data_parallel_replicate_degree": 2,
    "parallelism.llm.ranks": '"0-1"',
    "parallelism.llm.data_parallel_shard_degree": 2,
    "parallelism.llm.tensor_parallel_degree": 1,
    "training.global_batch_size": 8,
}

EQUAL: Mapping[str, object] = {
    **{"data.options.max_images": 1, "data.options.text_only": 0.0},
    "data.options.text_tokens": "[256, 256]",
}
"""Samples of one size: all batches are equal, and nothing is padded."""


def sized(sizes: Mapping[str, object], layout: Mapping[str, object], **more: object) -> Recipe:
    """The recipe; it runs as long as somebody steps it."""
    keys = {**sizes, **layout, "training.steps": 100000, **more}
    return load_recipe(RECIPES / "siglip_qwen3_8b.toml", [f"--{key}={value}" for key, value in keys.items()])
