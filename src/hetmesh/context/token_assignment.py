"""Token assignment: which context-parallel rank keeps which tokens. Equal on every rank, a function of the mask alone.

Policies: `contiguous` and `zigzag`, which know nothing of the mask, `lpt`, the published rule of Cornstarch
(arXiv 2503.11367), and `balanced`, the default. Each takes the work and the tokens of blocks and returns the rank of
every block: cuts lie on block edges, because a kernel that works on whole blocks pays a cut block twice.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np

from hetmesh.context.balanced import balanced
from hetmesh.context.key_tiles import block_edges, tile_counts
from hetmesh.context.pieces import sample_starts
from hetmesh.context.segments import Mask
from hetmesh.errors import LayoutError
from hetmesh.layout import Intervals

Policy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(work of each block, tokens of each block, ranks) -> the rank of each block, int64."""


def contiguous(work: np.ndarray, tokens: np.ndarray, ranks: int) -> np.ndarray:
    """Equal runs of blocks in order."""
    return np.arange(len(work)) * ranks // max(len(work), 1)


def zigzag(work: np.ndarray, tokens: np.ndarray, ranks: int) -> np.ndarray:
    """2R equal chunks; rank r gets chunks r and 2R - 1 - r, which balances a causal mask."""
    chunk = contiguous(work, tokens, 2 * ranks)
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def lpt(work: np.ndarray, tokens: np.ndarray, ranks: int) -> np.ndarray:
    """Longest processing time first: blocks by falling work, each to the least loaded rank."""
    owner = np.empty(len(work), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    costs = work.tolist()
    for block in np.argsort(-work, kind="stable").tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[block], rank))
        owner[block] = rank
    return owner


POLICIES: dict[str, Policy] = {"balanced": balanced, "contiguous": contiguous, "lpt": lpt, "zigzag": zigzag}
"""The policies by name."""


def assign(
    mask: Mask,
    ranks: int,
    *,
    policy: str | Policy = "balanced",
    block: int = 128,
    tile: int = 32,
    row_cost: int = 0,
    cut_cost: int = 0,
) -> tuple[Intervals, ...]:
    """The tokens of each context-parallel rank, as ordered position intervals; together they are the sequence, once.

    Args:
        ranks: at least 1; some get nothing where there are fewer blocks than ranks.
        policy: a key of `POLICIES`, or a function such as `partial(balanced, token_cap=1.1)`.
        block: cuts lie on multiples of it: the query rows of a kernel's block. Without such a kernel 1 is exact.
        row_cost: for `balanced`: what a row takes beside its attention, in (query, key) pairs. Pairs are then balanced
            only as far as they count beside rows, which takes fewer cuts.
        cut_cost: for `balanced`: what a cut within a sample sends beside keys, in rows of keys.

    Raises:
        LayoutError: an unknown policy, or a number that is not positive.
    """
    if (isinstance(policy, str) and policy not in POLICIES) or ranks < 1 or block < 1:
        raise LayoutError(
            f"assignment of tokens: policy {policy!r} must be one of {sorted(POLICIES)}, ranks ({ranks}) and block "
            f"({block}) at least 1"
        )
    edges = block_edges(mask.length, block)
    rule = POLICIES[policy] if isinstance(policy, str) else policy
    tiles, rows = tile_counts(mask, edges, tile), np.diff(edges)
    if rule is balanced and (row_cost or cut_cost):
        within = ~np.isin(edges[:-1], sample_starts(mask))
        mean = max(float(tiles.sum()) / max(len(tiles), 1) * tile, 1.0)
        cut = 1 + (tiles * tile + cut_cost * within) / mean
        rule = partial(balanced, block_cost=row_cost / tile, cut=cut)
    return intervals_of(edges, rule(tiles, rows, ranks), ranks)


def intervals_of(edges: np.ndarray, owner: np.ndarray, ranks: int) -> tuple[Intervals, ...]:
    """The position intervals of each rank, ascending, from the rank of every block."""
    seam = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    first = np.flatnonzero(seam)
    starts, stops = edges[:-1][first], edges[np.append(first[1:], len(owner))[: len(first)]]
    order = np.argsort(owner[first], kind="stable")
    pairs = list(zip(starts[order].tolist(), stops[order].tolist(), strict=True))
    cuts = np.searchsorted(owner[first][order], np.arange(ranks + 1)).tolist()
    return tuple(tuple(pairs[a:b]) for a, b in itertools.pairwise(cuts))
