"""A data source of random samples whose media a directory's own processor prepares."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hetmesh.data.preparation import placed_items
from hetmesh.data.source import Sample, wants
from hetmesh.graph import SampleMeta
from hetmesh.models.split.processor import processor_at
from hetmesh.recipe.hf_families import part_of
from hetmesh.testing.precision import kept_casts
from hetmesh.testing.sources import RandomMedia
from surveying.tiny_processor import placeholder

SIZES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "image": ((8, 8), (24, 16), (16, 40)),
    "audio": ((800,), (1600,), (4000,)),
}
"""Heights and widths of images, lengths of recordings."""


class PreparedMedia(RandomMedia):
    """`RandomMedia` of letters and of media whose processor is that of a directory of `tiny_vlms`.

    Args:
        kinds: of media.
        options: as those of `RandomMedia`.
    """

    def __init__(self, directory: str, kinds: Sequence[str], **options: Any) -> None:
        super().__init__({kind: SIZES[kind][0] for kind in kinds}, **options)
        self.processor = processor_at(Path(directory), directory)
        config = part_of(json.loads(Path(directory, "config.json").read_text()))
        self.written = {kind: placeholder(config["model_type"], self.processor.own, kind) for kind in kinds}
        self.placeholders = {kind: self.processor.row_tokens[kind] for kind in kinds}
        self.vocab_size = len(self.processor.tokenizer)
        self._make = lru_cache(512)(self._prepared)  # type: ignore[method-assign]

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        whole = self._make(index)[1]
        return replace(whole, units={kind: unit for kind, unit in whole.units.items() if wants(kinds, kind)})

    def _prepared(self, index: int) -> tuple[SampleMeta, Sample]:
        rng, text = random.Random(f"{self.seed}:{index}"), ""
        sequence = self.sequence(rng)
        draw = np.random.default_rng(rng.randrange(2**31))
        media: dict[str, list[Any]] = {}
        for kind in sequence:
            if kind:
                media.setdefault(kind, []).append(_item(kind, rng.choice(SIZES[kind]), draw))
            text += self.written[kind] if kind else rng.choice("abcdefgh")
        identity = f"prepared-{self.seed}-{index}"
        with kept_casts():
            made = self.processor(text, media)
        placed = placed_items(identity, self.processor, made, [kind for kind in sequence if kind])
        rows = {kind: sum(item.rows for item in placed if item.name == kind) for kind in made.units}
        meta = SampleMeta(identity, len(made.ids), placed, self.targets(index, rng, len(made.ids)))
        return meta, Sample(identity, torch.tensor(made.ids), units=made.units, unit_rows=rows)


def _item(kind: str, size: tuple[int, ...], draw: np.random.Generator) -> Any:
    if kind == "audio":
        return np.float32(draw.standard_normal(size) / 8)
    return Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8))
