"""The mask families on which token assignment is measured, at any length; deterministic; and what an assignment costs
each rank: tiles, tokens, runs, and the keys that lie elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetmesh.context import Mask, Rule, Sees, Segment, causal, join, needed_keys, text_with_instances, tile_counts
from hetmesh.context.key_tiles import block_edges
from hetmesh.context.rule import TEXT
from hetmesh.layout import Intervals
from hetmesh.layout.intervals import coalesce

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

    spans = _instances(random.Random(seed), tokens, _TEXT, _IMAGE)

    def documents(together: Callable[[list[Mask]], Mask], multimodal: bool) -> Mask:
        rng = random.Random(seed)
        masks, left = [], tokens
        while left:
            length = min(left, rng.randint(*_DOCUMENT))
            inside = _instances(rng, length, _LONG_TEXT, _IMAGE) if multimodal else []
            masks.append(text_with_instances(length, inside))
            left -= length
        return together(masks)

    small = _instances(random.Random(seed), tokens, _LONG_TEXT, _SMALL_IMAGE)
    return {
        "image_bits": text_with_instances(tokens, spans),
        "image_bits_see_text": text_with_instances(tokens, spans, instances_see=Sees.TEXT),
        "one_vision_bit": text_with_instances(tokens, spans, numbers=[1] * len(spans)),
        "causal": causal(tokens),
        "packed_documents": documents(join, False),
        "packed_multimodal": documents(join, True),
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


def prefix(documents: Iterable[Mask]) -> Mask:
    """Documents in one row of which every token sees all earlier documents, beside what it saw before."""
    joined = join(documents)
    segments = (replace(s, sees=s.sees | Sees.EARLIER_DOCUMENTS) for s in joined.segments)
    return Mask(tuple(segments), joined.length)


def padded(mask: Mask, length: int) -> Mask:
    """The same with padding up to `length`."""
    return Mask(mask.segments, length)


def blockwise_causal(lengths: Sequence[int], *, rule: Rule = Rule.CAUSAL) -> Mask:
    """Blocks that see themselves, by `rule`; the last one sees everything before it too (few-shot examples, then the
    question: FlashMask, arXiv 2410.01359).
    """
    segments, at = [], 0
    for document, length in enumerate(lengths):
        sees = Sees.EARLIER_DOCUMENTS if document == len(lengths) - 1 else Sees.NOTHING
        segments.append(Segment(document, TEXT, at, at + length, rule, sees))
        at += length
    return Mask(tuple(segments), at)


@dataclass(frozen=True)
class Loads:
    """What an assignment costs each rank.

    Attributes:
        tiles: visible tiles that its rows pay; a block cut between ranks or runs pays every tile of each part.
        tokens: rows.
        remote: key tiles that its rows need and that lie, in part at least, on other ranks; each once.
        runs: intervals.
        ideal_tiles: tiles of the uncut sequence over ranks.
    """

    tiles: tuple[int, ...]
    tokens: tuple[int, ...]
    remote: tuple[int, ...]
    runs: tuple[int, ...]
    ideal_tiles: float

    @property
    def tile_imbalance(self) -> float:
        """The largest share of tiles over the ideal one."""
        return max(self.tiles) / self.ideal_tiles if self.ideal_tiles else 1.0

    @property
    def token_imbalance(self) -> float:
        """The largest share of tokens over the mean."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0


def loads(mask: Mask, shares: tuple[Intervals, ...], *, block: int = 128, tile: int = 32) -> Loads:
    """What an assignment costs each rank; for benchmarks and reports, not for every step."""
    whole = block_edges(mask.length, block)
    spans = np.array([(*span, rank) for rank, runs in enumerate(shares) for span in runs], np.int64).reshape(-1, 3)
    spans = spans[np.argsort(spans[:, 0])]
    edges = np.unique(np.concatenate([whole, spans[:, 0], spans[:, 1]]))
    counts = tile_counts(mask, edges, tile)
    owner = spans[np.searchsorted(spans[:, 0], edges[:-1], side="right") - 1, 2]
    tiles = np.bincount(owner, counts, len(shares)).astype(np.int64)
    remote = []
    for runs in shares:
        needed = _covered(needed_keys(mask, runs, tile), mask.length, tile, whole=False)
        remote.append(int((needed & ~_covered(coalesce(runs), mask.length, tile, whole=True)).sum()))
    return Loads(
        tuple(tiles.tolist()),
        tuple(sum(b - a for a, b in runs) for runs in shares),
        tuple(remote),
        tuple(map(len, shares)),
        float(tile_counts(mask, whole, tile).sum()) / len(shares),
    )


def _covered(runs: Intervals, length: int, tile: int, *, whole: bool) -> np.ndarray:
    """Tiles that intervals touch, or (`whole`) fill; bool [tiles]."""
    starts, stops = np.array(runs, np.int64).reshape(-1, 2).T
    if whole:
        starts, stops = -(-starts // tile), np.where(stops == length, -(-stops // tile), stops // tile)
    else:
        starts, stops = starts // tile, -(-stops // tile)
    keep = starts < stops
    change = np.zeros(-(-length // tile) + 1, np.int64)
    np.add.at(change, starts[keep], 1)
    np.add.at(change, stops[keep], -1)
    return np.cumsum(change)[:-1] > 0
