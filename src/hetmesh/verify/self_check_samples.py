"""Samples on which a model of transformers and its parts are compared: text alone, with one item, and with several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hetmesh.data.in_memory import MemorySource
from hetmesh.data.source import Sample
from hetmesh.graph.sample import MediaItem, SampleMeta

KINDS = ("text alone", "one item", "several items", "several items of all kinds")
TEXT = 7
"""Text tokens before, between and behind items."""

Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""By placeholder the extents (`MediaItem.extent`) of a small and a larger item."""


def self_check_source(
    config: Any,
    shapes: Shapes,
    placeholders: Mapping[str, int],
    size_dims: Mapping[str, Callable[[tuple[int, ...]], int]],
    around: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    seed: int = 0,
) -> MemorySource:
    """One sample of each of `KINDS`, random: every token behind the first two is a target, media aside.

    Args:
        config: the whole model's; tokens that mean something to it are left out of the text.
        placeholders: token id by placeholder.
        size_dims: by placeholder how many numbers of an extent are the size.
        around: by placeholder the tokens before and behind an item, where the model wants some.
    """
    draw = torch.Generator().manual_seed(seed)
    vocabulary = config.get_text_config().vocab_size
    special = _special(config) | {*placeholders.values(), 0}
    text = torch.tensor([i for i in range(min(vocabulary, 4096)) if i not in special])
    kinds = list(shapes)
    wanted: list[list[tuple[str, tuple[int, ...]]]] = [
        [],
        [(kinds[0], shapes[kinds[0]][0])],
        [(kinds[0], shape) for shape in (*shapes[kinds[0]], shapes[kinds[0]][0])],
        [(kind, shape) for kind in reversed(kinds) for shape in shapes[kind]],
    ]
    kinds_of = zip(KINDS, wanted, strict=True)
    made = [_sample(name, items, placeholders, size_dims, around, text, draw) for name, items in kinds_of]
    pad = next(i for i in range(vocabulary) if i not in placeholders.values())
    return MemorySource(made, vocabulary, placeholders, pad)


def _sample(
    name: str,
    items: Sequence[tuple[str, tuple[int, ...]]],
    placeholders: Mapping[str, int],
    size_dims: Mapping[str, Callable[[tuple[int, ...]], int]],
    around: Mapping[str, tuple[int, int]],
    text: Tensor,
    draw: torch.Generator,
) -> tuple[SampleMeta, Sample]:
    def words() -> list[int]:
        return text[torch.randint(len(text), (TEXT,), generator=draw)].tolist()

    tokens, media = words(), []
    payload: dict[str, list[Tensor]] = {}
    for kind, extent in items:
        before, behind = ([token] for token in around[kind]) if kind in around else ([], [])
        tokens += before
        end = len(extent) - size_dims[kind](extent)
        shape, size = extent[:end], extent[end:]
        media.append(MediaItem(kind, shape, len(tokens), size=size))
        payload.setdefault(kind, []).append(torch.randn(shape, generator=draw))
        tokens += [placeholders[kind], *behind, *words()]
    start = len(tokens)
    tokens += words()  # the answer
    return SampleMeta(name, len(tokens), tuple(media), ((start, len(tokens)),)), Sample(
        name, torch.tensor(tokens), payload
    )


def _special(config: Any) -> set[int]:
    """Ids of tokens that the config names."""
    found: set[int] = set()
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if key.endswith(("_token_id", "_token_index")):
                found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return found
