"""Recipes of one small VLM on two ranks, and the most bytes of tensors that are alive in a step of theirs."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

from hetmesh.boundary import World
from hetmesh.data.source import Sample
from hetmesh.graph import SampleMeta
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import LiveBytes
from hetmesh.testing.sources import RandomMedia
from hetmesh.training.trainer import Trainer

STEP = 2  # whose peak is measured, after two others: optimizer state and buffers are there

_RECIPE = """
[modules.vision]
model = "siglip"
trainable = {encoder}
[modules.vision.config]
hidden_size = 192
num_hidden_layers = 2
num_attention_heads = 4
intermediate_size = 768
patch_size = 4
image_size = 32
num_channels = 1
[modules.projector]
model = "mlp"
[modules.llm]
model = "{model}"
[modules.llm.config]
hidden_size = 192
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = {key_heads}
head_dim = 48
{mlp}
tie_word_embeddings = false
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[data]
source = "measured_memory:LongAnswers"
[data.options]
kinds = {{ {kinds} }}
items = 1
max_text = 100
[training]
local_batch_size = {batch}
pack_samples = {packed}
{precision}
mixed_precision_reduce = "{reduced}"
steps = 1000
[activation_checkpoint]
mode = "{recomputed}"
{save_ops}
[checkpoint]
enable = false
[parallelism]
pipeline_parallel_schedule = "{schedule}"
pipeline_parallel_microbatch_size = 4
{tables}
"""

DRAWER = """
[modules.drawer]
model = "flow"
[modules.drawer.config]
queries = 8
hidden_size = 192
num_hidden_layers = 4
num_attention_heads = 4
patch_size = 4
[modules.drawer.loss]
kind = "flow_matching"
[[boundaries]]
from = "llm"
to = "drawer"
at = "drawing"
"""
"""A module after the LLM, in a recipe's tables."""

ALONE = "[parallelism.vision]\nranks = [0]\n"
PIPELINE = "[parallelism.llm]\nranks = [0, 1]\npipeline_parallel_degree = 2\n"


ADAPTERS = "[modules.llm.lora]\nrank = 8\nalpha = 16\n"


def both(*modules: str, key: str = "data_parallel_replicate_degree") -> str:
    """Modules on both ranks, which share them along an axis."""
    return "".join(f"[parallelism.{name}]\nranks = [0, 1]\n{key} = 2\n" for name in modules)


DENSE = "intermediate_size = 528"
EXPERTS = "num_experts = 8\nnum_experts_per_tok = 2\nmoe_intermediate_size = 264\nnorm_topk_prob = true"


def recipe(
    tables: str,
    *,
    schedule: str = "sequential",
    batch: int = 8,
    packed: bool = False,
    recomputed: str = "none",
    compute: str = "float32",
    reduced: str = "float32",
    key_heads: int = 4,
    experts: bool = False,
    encoder: bool = True,
    save_ops: str = "",
    dtype: str = "float32",
) -> Recipe:
    """A recipe; `tables` are those of `[parallelism]`, and whatever else; `encoder`: whether it is trained."""
    keys: dict[str, object] = {
        "schedule": schedule,
        "batch": batch,
        "recomputed": recomputed,
        "precision": f'dtype = "{dtype}"' if dtype != "float32" else f'mixed_precision_param = "{compute}"',
        "reduced": reduced,
        "key_heads": key_heads,
        "save_ops": f"save_ops = {save_ops}" if save_ops else "",
    }
    keys["kinds"] = "image = [1, 32, 32]" + ", drawing = [1, 32, 32]" * (DRAWER in tables)
    keys |= {"model": "qwen3_moe", "mlp": EXPERTS} if experts else {"model": "qwen3", "mlp": DENSE}
    return parse_recipe(_RECIPE.format(tables=tables, packed=_toml(packed), encoder=_toml(encoder), **keys))


def _toml(value: bool) -> str:
    return str(value).lower()


class LongAnswers(RandomMedia):
    """`RandomMedia` with a vocabulary that makes logits matter, and the second half of each sample as targets."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.vocab_size = 512

    def _make(self, index: int) -> tuple[SampleMeta, Sample]:
        meta, sample = super()._make(index)
        first = max([item.position + 1 for item in meta.media] + [meta.tokens // 2])
        return replace(meta, targets=((first, meta.tokens),)), sample


def measured(rank: int, given: Recipe) -> tuple[int, int, list[tuple[str, int]]]:
    """Bytes alive after step `STEP`, the most in it, and the most of each action."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, LiveBytes() as live:
        job = given.job.model_copy(update={"dump_folder": folder})
        trainer = Trainer(resolve(given.model_copy(update={"job": job})), World.current())
        try:
            for _ in range(STEP):
                trainer.train_step()
            live.restart()
            trainer.job.runtime.live_bytes = live
            trainer.train_step()
        finally:
            trainer.upcoming.close()
            trainer.reporter.close()
    return live.live, live.peak, [(str(span.label), span.peak) for span in live.spans]
