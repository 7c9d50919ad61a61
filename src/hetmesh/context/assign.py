"""Token assignment: which context-parallel rank keeps which tokens. Equal on every rank, a function of the mask alone.

Policies: `contiguous` and `zigzag`, which know nothing of the mask, `lpt`, the published rule of Cornstarch
(arXiv 2503.11367), and `balanced`, the default, in balanced.py. Each takes blocks with their work and returns the rank
of every block; cuts lie on block edges, because a kernel that works on whole blocks pays a cut block twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetmesh.context.balanced import balanced
from hetmesh.context.masks import Mask
from hetmesh.context.tiles import block_edges, needed_keys, tile_counts
from hetmesh.errors import LayoutError
from hetmesh.layout import Intervals, RowSplit


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of query rows in order.

    Attributes:
        edges: positions of their edges, int64 [blocks + 1].
        work: cost of each, in any unit, int64 or float64 [blocks]: visible tiles, perhaps plus a cost per row.
    """

    edges: np.ndarray
    work: np.ndarray

    @classmethod
    def of(cls, mask: Mask, *, block: int = 128, tile: int = 32, row_cost: float = 0.0) -> Blocks:
        """Visible tiles as work.

        Args:
            block: rows of a block, at least 1.
            tile: key columns of a tile.
            row_cost: work of one row beside attention, in tiles.
        """
        edges = block_edges(mask.length, block)
        work = tile_counts(mask, edges, tile)
        return cls(edges, work + row_cost * np.diff(edges) if row_cost else work)

    @property
    def tokens(self) -> np.ndarray:
        """Rows per block."""
        return np.diff(self.edges)


def contiguous(blocks: Blocks, ranks: int) -> np.ndarray:
    """Equal runs of blocks in order."""
    return np.arange(len(blocks.work)) * ranks // max(len(blocks.work), 1)


def zigzag(blocks: Blocks, ranks: int) -> np.ndarray:
    """2R equal chunks; rank r gets chunks r and 2R - 1 - r, which balances a causal mask."""
    chunk = contiguous(blocks, 2 * ranks)
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def lpt(blocks: Blocks, ranks: int) -> np.ndarray:
    """Longest processing time first: blocks by falling work, each to the least loaded rank."""
    owner = np.empty(len(blocks.work), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    work = blocks.work.tolist()
    for block in np.argsort(-blocks.work, kind="stable").tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + work[block], rank))
        owner[block] = rank
    return owner


def _balanced(blocks: Blocks, ranks: int) -> np.ndarray:
    return balanced(blocks.work, blocks.tokens, ranks)


POLICIES: dict[str, Callable[[Blocks, int], np.ndarray]] = {
    "balanced": _balanced,
    "contiguous": contiguous,
    "lpt": lpt,
    "zigzag": zigzag,
}
"""Policy -> the rank of every block, int64 [blocks]."""


def assign(
    mask: Mask, ranks: int, *, policy: str = "balanced", block: int = 128, tile: int = 32, row_cost: float = 0.0
) -> tuple[Intervals, ...]:
    """The tokens of each context-parallel rank, as ordered position intervals; together they are the sequence, once.

    Args:
        mask: of the whole sequence.
        ranks: at least 1; some get nothing where there are fewer blocks than ranks.
        policy: a key of `POLICIES`.
        block, tile, row_cost: see `Blocks.of`.

    Raises:
        LayoutError: an unknown policy, or a number that is not positive.
    """
    if policy not in POLICIES or ranks < 1 or block < 1:
        raise LayoutError(
            f"assignment of tokens: policy {policy!r} must be one of {sorted(POLICIES)}, ranks ({ranks}) and block "
            f"({block}) at least 1"
        )
    blocks = Blocks.of(mask, block=block, tile=tile, row_cost=row_cost)
    return intervals_of(blocks.edges, POLICIES[policy](blocks, ranks), ranks)


def intervals_of(edges: np.ndarray, owner: np.ndarray, ranks: int) -> tuple[Intervals, ...]:
    """The position intervals of each rank, ascending, from the rank of every block."""
    seam = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    first = np.flatnonzero(seam)
    starts, stops = edges[:-1][first], edges[np.append(first[1:], len(owner))[: len(first)]]
    order = np.argsort(owner[first], kind="stable")
    pairs = list(zip(starts[order].tolist(), stops[order].tolist(), strict=True))
    cuts = np.searchsorted(owner[first][order], np.arange(ranks + 1)).tolist()
    return tuple(tuple(pairs[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True))


def row_split(shares: tuple[Intervals, ...], dim: int = 1) -> RowSplit:
    """The assignment as a placement of tensors whose sequence dim is `dim`; boundaries, position ids, labels and loss
    follow it.
    """
    return RowSplit(dim, shares)


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
        remote.append(int((needed & ~_covered(runs, mask.length, tile, whole=True)).sum()))
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
