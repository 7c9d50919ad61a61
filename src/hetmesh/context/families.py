"""The mask families on which token assignment is measured, at any length; deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable

from hetmesh.context.builders import blockwise_causal, causal, packed, prefix, text_with_instances
from hetmesh.context.masks import Mask
from hetmesh.context.rule import Sees

_IMAGE = (576, 1728)  # tokens of a large image: one to three tiles of 24 x 24 patches
_TEXT = (64, 2176)
_SMALL_IMAGE = (64, 256)
_LONG_TEXT = (256, 1536)
_DOCUMENT = (256, 4096)


def families(tokens: int, seed: int = 0) -> dict[str, Mask]:
    """Name -> mask, eight of them.

    At 65,536 tokens the first three have about 29 images among text, half of the tokens; "images embedded in text" has
    many small ones. Packed documents are text, packed multimodal ones have images too, and so have prefix documents,
    where every token sees all earlier documents.
    """

    def images(**options: object) -> Mask:
        return text_with_instances(tokens, _instances(random.Random(seed), tokens, _TEXT, _IMAGE), **options)  # type: ignore[arg-type]

    def documents(join: Callable[[list[Mask]], Mask], multimodal: bool) -> Mask:
        rng = random.Random(seed)
        masks, left = [], tokens
        while left:
            length = min(left, rng.randint(*_DOCUMENT))
            spans = _instances(rng, length, _LONG_TEXT, _IMAGE) if multimodal else []
            masks.append(text_with_instances(length, spans))
            left -= length
        return join(masks)

    small = _instances(random.Random(seed), tokens, _LONG_TEXT, _SMALL_IMAGE)
    return {
        "image_bits": images(),
        "image_bits_see_text": images(instances_see=Sees.TEXT),
        "one_vision_bit": images(shared=True),
        "causal": causal(tokens),
        "packed_documents": documents(packed, False),
        "packed_multimodal": documents(packed, True),
        "prefix_documents": documents(prefix, True),
        "images_in_text": text_with_instances(tokens, small),
    }


def blockwise(tokens: int, seed: int = 0) -> Mask:
    """Blockwise causal: blocks of 1/64 to 1/16 of the sequence, the last of which sees everything."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(rng.randint(tokens // 64, tokens // 16), tokens - sum(lengths)))
    return blockwise_causal(lengths)


def _instances(rng: random.Random, tokens: int, text: tuple[int, int], image: tuple[int, int]) -> list[tuple[int, int]]:
    spans, at = [], rng.randint(*text)
    while at < tokens:
        stop = min(tokens, at + rng.randint(*image))
        spans.append((at, stop))
        at = stop + rng.randint(*text)
    return spans
