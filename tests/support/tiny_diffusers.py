"""Tiny random directories of diffusers: transformers, and autoencoders whose latents they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CONDITION = 8
"""Width of the rows that the transformers read."""

_BLOCKS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {
        **_BLOCKS,
        "sample_size": 4,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": CONDITION,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 6,
        "pos_embed_max_size": 8,
    },
    "FluxTransformer2DModel": {
        **_BLOCKS,
        "num_single_layers": 1,
        "in_channels": 16,
        "joint_attention_dim": CONDITION,
        "pooled_projection_dim": 6,
        "axes_dims_rope": [2, 2, 4],
    },
    "PixArtTransformer2DModel": {
        **_BLOCKS,
        "sample_size": 4,
        "in_channels": 4,
        "out_channels": 8,
        "cross_attention_dim": 16,
        "caption_channels": CONDITION,
        "norm_num_groups": 2,
    },
    "SanaTransformer2DModel": {
        **_BLOCKS,
        "sample_size": 4,
        "in_channels": 4,
        "out_channels": 4,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": CONDITION,
    },
    "AuraFlowTransformer2DModel": {
        "sample_size": 4,
        "in_channels": 4,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": CONDITION,
        "caption_projection_dim": 16,
        "pos_embed_max_size": 4,
    },
    "PRXTransformer2DModel": {
        "in_channels": 4,
        "context_in_dim": CONDITION,
        "hidden_size": 16,
        "num_heads": 2,
        "depth": 2,
        "axes_dim": [4, 4],
    },
}
AUTOENCODERS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": [8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "sample_size": 8,
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
    },
    "AutoencoderDC": {
        "in_channels": 1,
        "latent_channels": 4,
        "attention_head_dim": 4,
        "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "encoder_block_out_channels": [8, 8],
        "decoder_block_out_channels": [8, 8],
        "encoder_qkv_multiscales": [[], [5]],
        "decoder_qkv_multiscales": [[], [5]],
        "encoder_layers_per_block": [1, 1],
        "decoder_layers_per_block": [1, 1],
        "scaling_factor": 0.7,
    },
}
"""All halve the sides of images `(1, 8, 8)`, to latents `(4, 4, 4)`."""


def save(name: str, folder: Path, **changes: Any) -> Path:
    """The directory `folder/name` of a class of `TRANSFORMERS` or `AUTOENCODERS`."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(diffusers, name)(**(TRANSFORMERS | AUTOENCODERS)[name] | changes)
        for parameter in model.parameters():  # some begin as zeros, which would hide what depends on them
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / name)
    return folder / name
