"""Key tiles that every row of a group sees whole: a kernel computes them without a mask."""

from __future__ import annotations

import numpy as np

from hetmesh.context.masks import Mask
from hetmesh.context.sources import ragged
from hetmesh.context.tiles import TileIntervals, tile_intervals
from hetmesh.layout import Intervals


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

    # Each first row is a group of its own, those between them are left out.
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


def row_edges(runs: Intervals, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Query blocks of one rank, for `tile_intervals` and `full_tiles`.

    Args:
        runs: its ascending position intervals.
        block: rows; blocks lie on multiples of it.

    Returns:
        Edges of groups, int64, and which of the groups are blocks of the rank, int64 indices in the order of its rows;
        the others are what lies between its runs.
    """
    edges: list[np.ndarray] = []
    for start, stop in runs:
        edges += [np.array([start]), np.arange(start // block * block + block, stop, block), np.array([stop])]
    if not edges:
        return np.zeros(1, np.int64), np.zeros(0, np.int64)
    groups = [len(part) for part in edges]
    cuts = np.cumsum(groups)[2::3]  # the group behind the last edge of each run is not the rank's
    return np.concatenate(edges), np.setdiff1d(np.arange(cuts[-1] - 1), cuts - 1)
