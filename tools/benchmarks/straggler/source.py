"""Charts of a length law of `benchmarks.balance`, small enough for a core, and the recipe that trains on them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from benchmarks.balance.laws import LAWS, MERGE
from hetmesh.data.source import Sample, wants
from hetmesh.graph import MediaItem, SampleMeta
from hetmesh.recipe.recipe import Recipe, parse_recipe

PATCH = 4  # pixels
STEP = 2  # patches to a side of a row
VOCABULARY = 256

_RECIPE = """
[modules.vision]
model = "qwen3_vl_vision"
[modules.vision.config]
hidden_size = {width}
depth = {vision_layers}
num_heads = 4
patch_size = 4
spatial_merge_size = 2
temporal_patch_size = 1
num_position_embeddings = 256
deepstack_visual_indexes = []

[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = {llm_width}
num_hidden_layers = {llm_layers}
num_attention_heads = 4
num_key_value_heads = 4
head_dim = {head}
intermediate_size = {inner}

[[boundaries]]
from = "vision"
to = "llm"
at = "image"

[parallelism]
pipeline_parallel_schedule = "1f1b"
pipeline_parallel_microbatch_size = {microbatch}
[parallelism.vision]
ranks = [0]
[parallelism.llm]
ranks = [1]

[balance]
policy = "{policy}"
microbatches = "{number}"

[data]
source = "benchmarks.straggler.source:Charts"
[data.options]
law = "{law}"
smaller = {smaller}

[training]
local_batch_size = {batch}
pack_samples = true
steps = 1000000
seq_len = 8192

[checkpoint]
enable = false
"""


def recipe(
    policy: str,
    number: str,
    *,
    law: str,
    width: int,
    smaller: float,
    vision_layers: int,
    llm_layers: int,
    microbatch: int,
    microbatches: int,
) -> Recipe:
    """An encoder on rank 0, an LLM of twice its width on rank 1.

    Args:
        policy, number: `[balance] policy` and `microbatches`.
        law, smaller: of `Charts`.
        microbatch, microbatches: samples per microbatch, and how many there are if their number is not free.
    """
    text = _RECIPE.format(
        policy=policy,
        number=number,
        law=law,
        smaller=smaller,
        width=width,
        vision_layers=vision_layers,
        llm_width=2 * width,
        llm_layers=llm_layers,
        head=width // 2,
        inner=2 * width * 11 // 4,
        microbatch=microbatch,
        batch=microbatch * microbatches,
    )
    return parse_recipe(text)


class Charts:
    """Samples of one image and a text behind it, as long as a law says; noise, since only sizes matter.

    Args:
        law: a key of `LAWS` that knows images and text.
        smaller: by what lengths are divided: a tower that is as much narrower spends as large a share on attention.
        length: samples in the source.
    """

    pad_id = 0
    vocab_size = VOCABULARY

    def __init__(self, law: str, smaller: float, length: int = 4096) -> None:
        self.placeholders = {"image": 1}
        rows = LAWS[law](length, np.random.default_rng(0), 0.0)
        patches, tokens = rows["vision"][0], rows["llm"][0]
        text = np.maximum((tokens - patches // MERGE) / smaller, 4).astype(int)
        self._sizes = [(*_grid(n / smaller), length) for n, length in zip(patches.tolist(), text.tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self._sizes)

    def meta(self, index: int) -> SampleMeta:
        """An image, then text, of which the second half is learnt."""
        height, width, text = self._sizes[index]
        item = MediaItem("image", (1, PATCH * height, PATCH * width), 0)
        return SampleMeta(f"chart-{index}", 1 + text, (item,), ((1 + text // 2, 1 + text),))

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """Noise of that size."""
        meta = self.meta(index)
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, VOCABULARY, (meta.tokens,), generator=generator)
        tokens[0] = self.placeholders["image"]
        sample = Sample(meta.id, tokens)
        if not wants(kinds, "image"):
            return sample
        return replace(sample, media={"image": [torch.randn(meta.media[0].shape, generator=generator)]})


def _grid(patches: float) -> tuple[int, int]:
    """The sides, in patches, of an image of about so many, both multiples of `STEP`."""
    height = max(round(patches**0.5 / STEP), 1) * STEP
    return height, max(round(patches / height / STEP), 1) * STEP
