"""Visible key tiles of groups of query rows, as intervals and counts, straight from mask segments.

A block-sparse kernel pays for every (query block x key tile) with a visible entry, so that count is the work of a block
(Cornstarch, arXiv 2503.11367: 128 rows x 32 keys). Nothing here is ever as large as the tokens times the tokens, or a
map of tiles: intervals are listed per group of rows, except that long lists, which many groups share (all tokens of
all images), are only looked up in a table of running counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetmesh.context.mask_sources import Lists, Sources, merge, ragged
from hetmesh.context.segments import Mask
from hetmesh.errors import LayoutError
from hetmesh.layout import Intervals

_MIN_LOOKED_UP_INTERVALS = 48
"""Intervals of a source that is looked up instead of listed. With one bit for all images counting takes 0.7 of the time
that it takes with 8 at 65,536 tokens, and as long at a million."""

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
    rows = _Rows.make(mask, edges, tile)
    long = rows.sources.before.sizes + rows.sources.always.sizes > _MIN_LOOKED_UP_INTERVALS
    listed = _listed(rows, long)
    if not long[rows.source].any():
        return listed.counts
    return listed.counts + _Shared.make(rows, long).uncovered(rows, listed)


def tile_intervals(mask: Mask, edges: np.ndarray, tile: int = 32) -> TileIntervals:
    """The same as explicit intervals. Ask for the rows that are needed: a rank's own, not all ranks'."""
    rows = _Rows.make(mask, edges, tile)
    return _listed(rows, np.zeros(len(rows.sources), bool))


def needed_keys(mask: Mask, queries: Intervals, block: int = 128) -> Intervals:
    """The key blocks with a key that some row of `queries` sees, as ascending position intervals on multiples of
    `block` (the last one ends with the sequence).

    Time grows with segments, not with rows: of all rows of one kind the last one sees the most.
    """
    spans = np.array([span for span in queries if span[0] < span[1]], np.int64).reshape(-1, 2)
    sources = mask.sources
    seen = _last_rows(mask, sources, spans[:, 0], spans[:, 1])
    starts, stops = [], []
    for lists, limit in ((sources.before, seen), (sources.always, np.where(seen > 0, mask.length, 0))):
        owner, at = ragged(lists.first[:-1], lists.first[1:])
        visible = lists.starts[at] < limit[owner]
        starts.append(lists.starts[at][visible])
        stops.append(np.minimum(lists.stops[at], limit[owner])[visible])
    low, high = merge(np.concatenate(starts) // block * block, -(-np.concatenate(stops) // block) * block)
    return tuple(zip(low.tolist(), np.minimum(high, mask.length).tolist(), strict=True))


def _last_rows(mask: Mask, sources: Sources, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """For each source one past the last of the given rows that has it; 0 where none has."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    # The last span that begins before the segment ends; if that is too early for it, all others are.
    span = np.searchsorted(starts, mask.stops, side="left") - 1
    last = np.minimum(mask.stops, stops[span]) if len(starts) else np.zeros_like(mask.stops)
    last = np.where((span >= 0) & (last > mask.starts), last, 0)
    out = np.zeros(len(sources), np.int64)
    for of in sources.of_segment:
        np.maximum.at(out, of[of >= 0], last[of >= 0])
    return out


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


@dataclass(frozen=True, eq=False)
class _Rows:
    """Groups of query rows, and which of them have which source.

    Attributes:
        lower, upper: the columns around a group's own rows, on tile edges: all that lies before and after is the same
            for all its rows.
        group, source: one entry per group and source that some row of it has, ordered by both.
        stop: one past the last such row.
    """

    tile: int
    length: int
    sources: Sources
    lower: np.ndarray
    upper: np.ndarray
    group: np.ndarray
    source: np.ndarray
    stop: np.ndarray

    @classmethod
    def make(cls, mask: Mask, edges: np.ndarray, tile: int) -> _Rows:
        edges = np.asarray(edges, np.int64)
        if tile < 1 or len(edges) < 1 or edges[0] < 0 or edges[-1] > mask.length or (np.diff(edges) < 0).any():
            raise LayoutError(
                f"tiles of {tile} keys of a mask of {mask.length} tokens: edges must ascend within the length, the "
                f"tile must be positive; got edges {edges[:8].tolist()}, ..., {edges[-1:].tolist()}"
            )
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
        lower, upper = edges[:-1] // tile * tile, -(-edges[1:] // tile) * tile
        return cls(tile, mask.length, sources, lower, upper, group, key - group * len(sources), stop[last])


def _listed(rows: _Rows, long: np.ndarray) -> TileIntervals:
    """The visible tiles per group; of long sources only those around the group's own rows."""
    part = long[rows.source]
    low = rows.lower[rows.group] * part
    groups = len(rows.lower)
    tiles = -(-rows.length // rows.tile) + 1  # apart by one, so that different groups do not touch
    starts, stops = [], []
    limits = (rows.stop, np.where(part, np.minimum(rows.upper[rows.group], rows.length), rows.length))
    for lists, limit in zip((rows.sources.before, rows.sources.always), limits, strict=True):
        base = rows.source * rows.sources.stride
        first = np.searchsorted(lists.stop_keys, base + low, side="right")
        after = np.searchsorted(lists.start_keys, base + limit, side="left")
        entry, at = ragged(first, after)
        a, b = np.maximum(lists.starts[at], low[entry]), np.minimum(lists.stops[at], limit[entry])
        offset = rows.group[entry] * tiles
        starts.append(a // rows.tile + offset)
        stops.append(-(-b // rows.tile) + offset)
    a, b = merge(np.concatenate(starts), np.concatenate(stops))
    group = a // tiles
    return TileIntervals(np.searchsorted(group, np.arange(groups + 1)), a - group * tiles, b - group * tiles)


@dataclass(frozen=True, eq=False)
class _Table:
    """Sets of tiles by running counts: tiles below any point of the sets laid end to end."""

    starts: np.ndarray
    stops: np.ndarray
    before: np.ndarray

    @classmethod
    def make(cls, starts: np.ndarray, stops: np.ndarray) -> _Table:
        starts, stops = merge(starts, stops)
        return cls(starts, stops, np.cumsum(stops - starts) - (stops - starts))

    def between(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        if not len(self.starts):
            return np.zeros_like(low)
        return self._below(np.maximum(low, high)) - self._below(low)

    def _below(self, point: np.ndarray) -> np.ndarray:
        i = np.maximum(self.starts.searchsorted(point, side="right") - 1, 0)
        starts = self.starts[i]
        return self.before[i] + np.maximum(np.minimum(point, self.stops[i]), starts) - starts


@dataclass(frozen=True, eq=False)
class _Shared:
    """The long sources of every group: one set of tiles per distinct combination of them.

    Attributes:
        which: the combination of each group, -1 for none.
        below, above: per combination what is seen before a group's own rows, and after them.
    """

    which: np.ndarray
    below: _Table
    above: _Table
    tiles: int

    @classmethod
    def make(cls, rows: _Rows, long: np.ndarray) -> _Shared:
        use = long[rows.source]
        which, members = _combinations(rows.group[use], rows.source[use], len(rows.lower))
        tiles = -(-rows.length // rows.tile) + 1
        before = _tiles_of(rows.sources.before, members, rows.tile, tiles)
        always = _tiles_of(rows.sources.always, members, rows.tile, tiles)
        below = _Table.make(*(np.concatenate(pair) for pair in zip(before, always, strict=True)))
        return cls(which, below, _Table.make(*always), tiles)

    def uncovered(self, rows: _Rows, listed: TileIntervals) -> np.ndarray:
        """Shared tiles of each group that its listed intervals leave out."""
        lower, upper = rows.lower // rows.tile, rows.upper // rows.tile
        offset = np.maximum(self.which, 0) * self.tiles
        shared = self.below.between(offset, offset + lower) + self.above.between(offset + upper, offset + self.tiles)
        group = np.repeat(np.arange(len(lower)), np.diff(listed.first))
        base = offset[group]
        a, b = listed.starts + base, listed.stops + base
        twice = self.below.between(a, np.minimum(b, base + lower[group]))
        twice += self.above.between(np.maximum(a, base + upper[group]), b)
        both = np.concatenate([[0], twice.cumsum()])[listed.first]
        return np.where(self.which >= 0, shared - (both[1:] - both[:-1]), 0)


def _combinations(group: np.ndarray, source: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct sets of sources among groups. Returns the number per group (-1: no source), and pairs
    (number, source), int64 [2, ...]."""
    first = np.searchsorted(group, np.arange(groups))
    counts = np.bincount(group, minlength=groups)
    held = np.flatnonzero(counts)
    which = np.full(groups, -1)
    which[held] = source[first[held]]
    for place in range(1, int(counts.max())):  # sets that agree so far, and in the next source
        more = held[counts[held] > place]
        pair = which[more] * (int(source.max()) + 1) + source[first[more] + place]
        which[more] = np.unique(pair, return_inverse=True)[1] + int(which.max()) + 1
    _, example, number = np.unique(which[held], return_index=True, return_inverse=True)
    which[held], example = number, held[example]
    owner, at = ragged(first[example], first[example] + counts[example])
    return which, np.stack([owner, source[at]])


def _tiles_of(lists: Lists, members: np.ndarray, tile: int, tiles: int) -> tuple[np.ndarray, np.ndarray]:
    number, source = members
    owner, at = ragged(lists.first[source], lists.first[source + 1])
    offset = number[owner] * tiles
    return lists.starts[at] // tile + offset, -(-lists.stops[at] // tile) + offset
