"""Random samples of all kinds for the self-check: as a directory's own processor prepares them, or of tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetmesh.data.preparation import Preparation
from hetmesh.data.source import Sample
from hetmesh.data.synthetic import MemorySource
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.split.batching import random_item
from hetmesh.models.split.processor import EXAMPLES

KINDS = ("text alone", "one item", "several items", "several items of all kinds", "a larger item of each kind")
TEXT_TOKENS = 7
"""Text tokens before, between and after items."""


def self_check_source(
    config: Any, shapes: Mapping[str, tuple[int, ...]], placeholders: Mapping[str, int]
) -> MemorySource:
    """One random sample of each of `KINDS` but the last, the last text of which is the target.

    Args:
        config: the whole model's; tokens that mean something to it are left out of the text.
        shapes: of an item, by placeholder.
        placeholders: token id by placeholder.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    special = _special(config) | {*placeholders.values(), 0}
    text = torch.tensor([i for i in range(min(vocabulary, 4096)) if i not in special])

    def sample(name: str, items: Sequence[str]) -> tuple[SampleMeta, Sample]:
        def words() -> list[int]:
            return text[torch.randint(len(text), (TEXT_TOKENS,), generator=draw)].tolist()

        tokens, media = words(), []
        payload: dict[str, list[Tensor]] = {}
        for kind in items:
            media.append(MediaItem(kind, shapes[kind], len(tokens)))
            payload.setdefault(kind, []).append(torch.randn(shapes[kind], generator=draw))
            tokens += [placeholders[kind], *words()]
        start = len(tokens)
        tokens += words()  # the answer
        meta = SampleMeta(name, len(tokens), tuple(media), ((start, len(tokens)),))
        return meta, Sample(name, torch.tensor(tokens), payload)

    first, *others = shapes
    items = [[], [first], [first] * 3, [kind for kind in (*others[::-1], first) for _ in range(2)]]
    pad = next(i for i in range(vocabulary) if i not in placeholders.values())
    return MemorySource([sample(*kind) for kind in zip(KINDS, items, strict=False)], vocabulary, placeholders, pad)


def _special(config: Any) -> set[int]:
    found: set[int] = set()
    for part in (config, config.get_text_config()):
        for key, value in part.to_dict().items():
            if key.endswith(("_token_id", "_token_index")):
                found |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return found


def processed_samples(preparation: Preparation, kinds: Sequence[str]) -> MemorySource:
    """One conversation of each of `KINDS` of random letters and media of some kinds, as `preparation` makes it; the
    last where it does not take all others, so that a batch has items of two sizes. Raises RecipeError: it takes fewer
    than two of them."""
    draw, processor = random.Random(0), preparation.processor

    def words() -> str:
        return " ".join("".join(draw.choices("abcdefghij", k=3)) for _ in range(TEXT_TOKENS))

    def sample(name: str, items: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[SampleMeta, Sample]:
        media: dict[str, list[Any]] = {}
        for kind, size in items:
            media.setdefault(kind, []).append(random_item(processor.blank(kind, size)))
        question = words() + "".join(f" {processor.written(kind)} {words()}" for kind, _ in items)
        turns = preparation.turns(name, [("user", question), ("assistant", words())])
        return preparation.sample(name, turns, [kind for kind, _ in items], media)

    known = list(dict.fromkeys(kinds))
    sizes = {kind: EXAMPLES[kind] for kind in known}
    items: list[list[tuple[str, tuple[int, ...]]]] = [
        [],
        [(known[0], sizes[known[0]][0])],
        [(known[0], size) for size in sizes[known[0]]],
        [(kind, size) for kind in reversed(known) for size in sizes[kind][:2]],
        [(kind, sizes[kind][1]) for kind in known],
    ]
    samples, errors = [], list[str]()
    for name, each in zip(KINDS, items, strict=True):
        if name == KINDS[-1] and not errors:
            break
        try:
            samples.append(sample(name, each))
        except Exception as error:  # some processors take no text alone, or one item a sample
            errors.append(f"{name}: {' '.join(str(error).split())}")
    if len(samples) < 2:
        raise RecipeError(f"{processor.key}: its processor does not take random samples: {'; '.join(errors)}")
    placeholders = {kind: processor.row_tokens[kind] for kind in known}
    vocabulary = len(processor.tokenizer)
    pad = next(i for i in range(vocabulary) if i not in placeholders.values())
    return MemorySource(samples, vocabulary, placeholders, pad)
