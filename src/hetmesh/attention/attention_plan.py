"""What one rank of a context-parallel group computes and fetches: values and functions of values.

The keys of other ranks come in chunks of bounded size, in the order of a ring: at ring step s rank r takes rows of rank
r + s, so that no rank serves all others at once. Small steps are joined as long as nobody receives or sends more than a
chunk; the memory of a rank then depends on the size of a chunk, not on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetmesh.attention.key_blocks import BLOCK, Blocks, Buffer, KernelCalls, PartialMasks
from hetmesh.context import Mask, needed_keys, tile_intervals
from hetmesh.context.mask_sources import merge, ragged
from hetmesh.context.token_owners import cut_out
from hetmesh.layout import Intervals, RowSplit
from hetmesh.layout.intervals import coalesce, extent


@dataclass(frozen=True, eq=False)
class TakenRows:
    """Rows that each rank takes from those that have them.

    Attributes:
        taken: the positions that each coordinate takes, in the order of its buffer.
        served: the positions of each coordinate that are taken, ascending.
        places: local rows of this rank's `served`.
    """

    taken: RowSplit
    served: RowSplit
    places: Intervals


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One rank's part of attention. `chunks`: of keys of other ranks, in the order in which every rank goes through
    them, and what this rank computes on its buffer of each."""

    shares: RowSplit
    own: KernelCalls
    chunks: tuple[tuple[TakenRows, KernelCalls], ...]
    masks: PartialMasks


@lru_cache(maxsize=64)
def plan_attention(
    mask: Mask, shares: tuple[Intervals, ...], coordinate: int, window: int | None, chunk: int
) -> AttentionPlan:
    """The plan of one coordinate of a context-parallel group. Cached: layers share it.

    Args:
        window: a query at i sees a key at j only if |i - j| < window.
        chunk: key rows of others that a rank receives, or of its own that it sends, at a time.
    """
    runs = coalesce(shares[coordinate])
    blocks = Blocks.make(mask, runs, window)
    held = Buffer.of(runs)
    order = fetch_order(mask, shares, window, chunk)
    chunks = tuple(
        (taken_rows(taken, shares, coordinate), blocks.work(Buffer.of(taken[coordinate]))) for taken in order
    )
    return AttentionPlan(RowSplit(0, shares), blocks.work(held), chunks, PartialMasks(mask, window))


@lru_cache(maxsize=64)
def fetch_order(
    mask: Mask, shares: tuple[Intervals, ...], window: int | None, chunk: int
) -> tuple[tuple[Intervals, ...], ...]:
    """What the ranks of a group take from each other, equal on all of them. Returns per chunk and coordinate the
    positions that it takes, owner by owner, ascending within each."""
    ranks = len(shares)
    owners = _owners(shares)
    held_by = [_by_owner(window_keys(mask, runs, window), owners, ranks) for runs in shares]
    pieces = [[by_owner[(r + step) % ranks] for step in range(ranks)] for r, by_owner in enumerate(held_by)]
    chunks: list[tuple[Intervals, ...]] = []
    received = sent = np.zeros(ranks, np.int64)
    for step in range(1, ranks):
        sizes = np.array([extent(pieces[r][step]) for r in range(ranks)])
        for start in range(0, int(sizes.max()), chunk):
            part = np.clip(sizes - start, 0, chunk)
            gives = np.roll(part, step)  # coordinate r takes from r + step
            taken = tuple(cut_out(pieces[r][step], start, start + chunk) for r in range(ranks))
            if chunks and max((received + part).max(), (sent + gives).max()) <= chunk:
                received, sent = received + part, sent + gives
                chunks[-1] = tuple(a + b for a, b in zip(chunks[-1], taken, strict=True))
            else:
                received, sent = part, gives
                chunks.append(taken)
    return tuple(chunks)


def window_keys(mask: Mask, runs: Intervals, window: int | None, block: int = BLOCK) -> Intervals:
    """`needed_keys` under a sliding window: blocks with a key that some row of `runs` sees, nearer than `window`."""
    if window is None:
        return needed_keys(mask, runs, block)
    spans = np.array(sorted(runs), np.int64).reshape(-1, 2)
    run, segment = ragged(mask.stops.searchsorted(spans[:, 0], "right"), mask.starts.searchsorted(spans[:, 1]))
    first = np.maximum(mask.starts[segment], spans[run, 0])
    stop = np.minimum(mask.stops[segment], spans[run, 1])
    # Rows first, ..., stop - 1 are alike: the last one sees all that the others see, and their windows are one range.
    seen = tile_intervals(mask, np.append(np.stack([stop - 1, stop], axis=1), mask.length), 1)
    row, at = ragged(seen.first[:-1:2], seen.first[1::2])
    low = np.maximum(seen.starts[at], first[row] - window + 1)
    high = np.minimum(seen.stops[at], stop[row] + window - 1)
    near = low < high
    low, high = merge(low[near] // block * block, -(-high[near] // block) * block)
    return tuple(zip(low.tolist(), np.minimum(high, mask.length).tolist(), strict=True))


def _owners(shares: tuple[Intervals, ...]) -> Buffer:
    """All runs with their coordinate in the place of a row."""
    counts = [len(runs) for runs in shares]
    return Buffer.at(tuple(span for runs in shares for span in runs), np.repeat(np.arange(len(shares)), counts))


def _by_owner(wanted: Intervals, owners: Buffer, ranks: int) -> list[Intervals]:
    """Ascending positions, by the coordinate that holds them."""
    starts, stops = np.array(wanted, np.int64).reshape(-1, 2).T
    want, held = ragged(owners.stops.searchsorted(starts, "right"), owners.starts.searchsorted(stops, "left"))
    low, high = np.maximum(starts[want], owners.starts[held]), np.minimum(stops[want], owners.stops[held])
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for owner, a, b in zip(owners.rows[held].tolist(), low.tolist(), high.tolist(), strict=True):
        found[owner].append((a, b))
    return [coalesce(part) for part in found]


def taken_rows(taken: tuple[Intervals, ...], shares: tuple[Intervals, ...], coordinate: int) -> TakenRows:
    """What one rank gives, given what each takes."""
    spans = np.array([span for runs in taken for span in runs], np.int64).reshape(-1, 2).T
    starts, stops = merge(*spans)
    everything = tuple(zip(starts.tolist(), stops.tolist(), strict=True))
    served = _by_owner(everything, _owners(shares), len(shares))
    places = Buffer.of(shares[coordinate]).places(served[coordinate])
    return TakenRows(RowSplit(0, taken), RowSplit(0, tuple(served)), places)
