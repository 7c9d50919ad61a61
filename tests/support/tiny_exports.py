"""Runs of tiny directories, and what their exports are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer
from support import tiny_vlms

KEPT = """steps = {steps}
[job]
dump_folder = '{folder}'
[checkpoint]
enable = true
[optimizer]
name = "SGD"
lr = 0.1
{more}"""


def recipe(path, folder, more="", steps=2):
    return parse_recipe(tiny_vlms.recipe_text(path, KEPT.format(steps=steps, folder=folder, more=more)))


def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def save_now(rank, given, steps):
    """A checkpoint after some steps."""
    trainer = Trainer(resolve(given), World.current())
    trainer.reporter.close()
    for _ in range(steps):
        trainer.train_step()
    trainer.save()
    return trainer.upcoming.close()


def save_moe(folder: Path, **how: Any) -> Path:
    """A tiny Qwen3-MoE, as transformers saves it."""
    import transformers as t

    torch.manual_seed(5)
    model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**{**tiny_vlms.TEXT, **tiny_vlms.EXPERTS, "head_dim": 6}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, **how)
    return folder


def beside_a_tower(path: Path, folder: Path, ranks: str = "0", more: str = "", *changes: str) -> Recipe:
    """A recipe of the Qwen3-MoE at `path` behind a tiny tower with random weights."""
    return parse_recipe(
        f"""
        [job]
        dump_folder = '{folder}'
        [modules.vision]
        model = "siglip"
        config = {{ hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, image_size = 8, patch_size = 4 }}
        [modules.projector]
        model = "mlp"
        [modules.llm]
        model = "qwen3_moe"
        initial_load_path = '{path}'
        [[boundaries]]
        from = "vision"
        to = "projector"
        [[boundaries]]
        from = "projector"
        to = "llm"
        at = "image"
        [parallelism]
        ranks = "{ranks}"
        {more}
        [data]
        source = "hetmesh.testing.sources:RandomMedia"
        options = {{ kinds = {{ image = [3, 8, 8] }}, text_only = 1.0 }}
        [training]
        local_batch_size = 2
        pack_samples = true
        steps = 2
        [checkpoint]
        enable = true
    """,
        changes,
    )


def transposed(path: Path) -> Path:
    """A directory as it is on the hub: experts' matrices transposed."""
    held = load_file(path / "model.safetensors")
    held = {n: e.transpose(1, 2).contiguous() if ".experts." in n else e for n, e in held.items()}
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
    return path


def equal(before: Path, after: Path) -> bool:
    """Whether two directories have the same tensors, bit by bit."""
    ours, theirs = tensors(after), tensors(before)
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == each.dtype and torch.equal(ours[name], each) for name, each in theirs.items()
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        for parameter in model.parameters():  # where it lies in a mapped file, kernels round otherwise
            parameter.data = parameter.data.clone()
        return model(input_ids=torch.tensor([[5, 7, 9, 11, 3, 8]])).logits
