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
"""Text tokens before, between and after items."""

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
    """One random sample of each of `KINDS`, the last text of which is the target.

    Args:
        config: the whole model's; tokens that mean something to it are left out of the text.
        placeholders: token id by placeholder.
        size_dims: by placeholder how many numbers of an extent are the size.
        around: by placeholder the token before and after an item, where the model has some.
    """
    draw = torch.Generator().manual_seed(seed)
    vocabulary = config.get_text_config().vocab_size
    special = _special(config) | {*placeholders.values(), 0}
    text = torch.tensor([i for i in range(min(vocabulary, 4096)) if i not in special])

    def sample(name: str, items: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[SampleMeta, Sample]:
        def words() -> list[int]:
            return text[torch.randint(len(text), (TEXT,), generator=draw)].tolist()

        tokens, media = words(), []
        payload: dict[str, list[Tensor]] = {}
        for kind, extent in items:
            before, after = ([token] for token in around[kind]) if kind in around else ([], [])
            tokens += before
            end = len(extent) - size_dims[kind](extent)
            media.append(MediaItem(kind, extent[:end], len(tokens), size=extent[end:]))
            payload.setdefault(kind, []).append(torch.randn(extent[:end], generator=draw))
            tokens += [placeholders[kind], *after, *words()]
        start = len(tokens)
        tokens += words()  # the answer
        meta = SampleMeta(name, len(tokens), tuple(media), ((start, len(tokens)),))
        return meta, Sample(name, torch.tensor(tokens), payload)

    first, (small, *larger) = next(iter(shapes.items()))
    items: list[list[tuple[str, tuple[int, ...]]]] = [
        [],
        [(first, small)],
        [(first, shape) for shape in (small, *larger, small)],
        [(kind, shape) for kind in reversed(list(shapes)) for shape in shapes[kind]],
    ]
    pad = next(i for i in range(vocabulary) if i not in placeholders.values())
    return MemorySource([sample(*kind) for kind in zip(KINDS, items, strict=True)], vocabulary, placeholders, pad)


def _special(config: Any) -> set[int]:
    """Ids of tokens that the config names."""
    found: set[int] = set()
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if key.endswith(("_token_id", "_token_index")):
                found |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return found
