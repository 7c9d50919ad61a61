"""Visible key tiles of groups of query rows, as intervals and counts, straight from mask segments.

A block-sparse kernel pays for every (query block x key tile) with a visible entry, so that count is the work of a block
(Cornstarch, arXiv 2503.11367: 128 rows x 32 keys). Nothing here is ever as large as the tokens times the tokens, or a
map of tiles: intervals are listed per group of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetmesh.context.mask_sources import merge, ragged
from hetmesh.context.segments import Mask
from hetmesh.errors import LayoutError
from hetmesh.layout import Intervals

CHUNKS_AHEAD = 3
"""Chunks of keys on their way to a rank while one is computed. Ranks whose work is equal altogether have unequal work
chunk by chunk: with one on its way they waited for each other for a tenth of the time (two ranks, 16,384 tokens), with
three for a fiftieth."""

CHUNK_ROWS = (256, 2048)
"""Least and most key rows of a chunk."""


def chunk_rows(mean_rows: float) -> int:
    """Key rows of a chunk, of ranks that keep `mean_rows` tokens each: all chunks in memory together are as large as
    the share of one rank, so two ranks hold no less of each other's keys than many ranks do."""
    return int(min(max(mean_rows // (1 + CHUNKS_AHEAD), CHUNK_ROWS[0]), CHUNK_ROWS[1]))


class TileIntervals(NamedTuple):
    """Visible key tiles of groups of query rows: intervals [start, stop) in tiles, ascending and apart.

    Those of group g are `first[g]:first[g + 1]`.
    """

    first: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Visible tiles per group."""
        return np.diff(np.concatenate([[0], (self.stops - self.starts).cumsum()])[self.first])


def block_edges(length: int, block: int) -> np.ndarray:
    """Edges of blocks of `block` rows, the last one shorter: int64 [blocks + 1]."""
    return np.append(np.arange(0, length, block), length)


def tile_counts(mask: Mask, edges: np.ndarray, tile: int = 32) -> np.ndarray:
    """Visible key tiles of each group of query rows `edges[g]` to `edges[g + 1]`: int64 [groups].

    With groups of one row and tiles of one key it counts visible pairs. `edges`: ascending positions, at least one
    group; `block_edges` for equal blocks. Raises LayoutError: edges are not ascending or leave the sequence, or the
    tile is not positive.
    """
    return tile_intervals(mask, edges, tile).counts


def tile_intervals(mask: Mask, edges: np.ndarray, tile: int = 32) -> TileIntervals:
    """The same as explicit intervals. Ask for the rows that are needed: a rank's own, not all ranks'."""
    edges = np.asarray(edges, np.int64)
    if tile < 1 or len(edges) < 1 or edges[0] < 0 or edges[-1] > mask.length or (np.diff(edges) < 0).any():
        raise LayoutError(
            f"tiles of {tile} keys of a mask of {mask.length} tokens: edges must ascend within the length, the "
            f"tile must be positive; got edges {edges[:8].tolist()}, ..., {edges[-1:].tolist()}"
        )
    group, source, stop = _sources_of_rows(mask, edges)
    tiles = -(-mask.length // tile) + 1  # apart by one, so that different groups do not touch
    starts, stops = [], []
    for lists, limit in ((mask.sources.before, stop), (mask.sources.always, np.full_like(stop, mask.length))):
        after = np.searchsorted(lists.start_keys, source * mask.sources.stride + limit, side="left")
        entry, at = ragged(lists.first[source], after)
        offset = group[entry] * tiles
        starts.append(lists.starts[at] // tile + offset)
        stops.append(-(-np.minimum(lists.stops[at], limit[entry]) // tile) + offset)
    a, b = merge(np.concatenate(starts), np.concatenate(stops))
    group = a // tiles
    first = np.searchsorted(group, np.arange(len(edges)))
    return TileIntervals(first, a - group * tiles, b - group * tiles)


def needed_keys(mask: Mask, queries: Intervals, block: int = 128) -> Intervals:
    """The key blocks with a key that some row of `queries` sees, as ascending position intervals on multiples of
    `block` (the last one ends with the sequence).

    Time grows with segments, not with rows: of all rows of one kind the last one sees the most.
    """
    spans = np.array(sorted(queries), np.int64)
    found = tile_intervals(mask, np.append(spans, mask.length), block)
    _, at = ragged(found.first[:-1:2], found.first[1::2])  # what lies between spans is a group, too
    low, high = merge(found.starts[at] * block, found.stops[at] * block)
    return tuple(zip(low.tolist(), np.minimum(high, mask.length).tolist(), strict=True))


def full_tiles(mask: Mask, edges: np.ndarray, tile: int = 32) -> TileIntervals:
    """The tiles of `tile_intervals` in which every entry is visible; the sequence's end does not make a tile partial.

    A later row of a segment sees all that an earlier one sees, so a group's common keys are those of the first row of
    each of its segments. Groups with padding or without rows have none.
    """
    edges = np.asarray(edges, np.int64)
    groups, stride = len(edges) - 1, mask.length + 1
    low = np.maximum(edges.searchsorted(mask.starts, side="right") - 1, 0)
    segment, group = ragged(low, np.minimum(edges.searchsorted(mask.stops), groups))
    first = np.maximum(mask.starts[segment], edges[group])
    stop = np.minimum(mask.stops[segment], edges[group + 1])
    segment, group, first, stop = (x[first < stop] for x in (segment, group, first, stop))
    rows = np.bincount(group, stop - first, groups)
    pieces = np.where(rows == np.diff(edges), np.bincount(group, minlength=groups), 0)

    # Each first row is a separate group, those between them are left out.
    seen = tile_intervals(mask, np.append(np.stack([first, first + 1], axis=1), mask.length), 1)
    row, at = ragged(seen.first[:-1:2], seen.first[1::2])
    base = group[row] * stride
    edge = np.concatenate([seen.starts[at] + base, seen.stops[at] + base])
    step = np.repeat([1, -1], len(at))
    order = np.lexsort((step, edge))
    edge, common = edge[order], step[order].cumsum()
    owner = edge // stride
    held = (common == pieces[owner]) & (common > 0)
    owner, starts = owner[held], (edge % stride)[held]
    stops = np.append(edge[1:], 0)[held] - owner * stride
    starts, stops = -(-starts // tile), np.where(stops == mask.length, -(-stops // tile), stops // tile)
    whole = starts < stops
    return TileIntervals(np.searchsorted(owner[whole], np.arange(groups + 1)), starts[whole], stops[whole])


def _sources_of_rows(mask: Mask, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of query rows, and sources that some row of each has, ordered by both: int64 `[entries]` each; and one
    past the last such row."""
    sources = mask.sources
    low = np.maximum(edges.searchsorted(mask.starts, side="right") - 1, 0)
    high = np.minimum(edges.searchsorted(mask.stops), len(edges) - 1)
    segment, group = ragged(low, high)
    above = edges[group + 1]
    stop = np.minimum(mask.stops[segment], above)
    of = np.where(edges[group] < above, sources.of_segment[:, segment], -1)
    use = of >= 0
    key = (group * len(sources) + of)[use]
    # A source is in one row of `of` only, and there by ascending position: stable sorting leaves its last row last.
    order = key.argsort(kind="stable")
    key, stop = key[order], np.broadcast_to(stop, of.shape)[use][order]
    last = np.ones(len(key), bool)
    last[:-1] = key[1:] != key[:-1]
    key = key[last]
    group = key // max(len(sources), 1)
    return group, key - group * len(sources), stop[last]
