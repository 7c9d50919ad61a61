"""What an assignment costs each rank: tiles, tokens, runs, and the keys that lie elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmesh.context.masks import Mask
from hetmesh.context.tiles import block_edges, needed_keys, tile_counts
from hetmesh.layout import Intervals
from hetmesh.layout.intervals import coalesce


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
