"""Cells: how one tensor dim is cut by a layout, as arrays with an index that finds overlaps without looping over ranks.

Mistakes this prevents: a rank's region depends only on its coordinates along the axes that shard a dim, so replicas
share one cell and a plan never enumerates rank pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh._torch_compat import StridedShard
from hetmesh.layout.intervals import Intervals, chunk_bounds, extent, narrow
from hetmesh.layout.placements import RowSplit, sharded_dim


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one tensor dim.

    Attributes:
        axes: mesh axis indices that shard the dim, ascending. A cell is one coordinate tuple along them, row-major.
        sizes: sizes of these axes.
        starts, stops: all intervals of all cells, int64, cell by cell, in local order.
        first: intervals of cell c are `first[c]:first[c + 1]`.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: np.ndarray
    stops: np.ndarray
    first: np.ndarray

    def intervals(self, cell: int) -> Intervals:
        """The ordered intervals of one cell."""
        rows = slice(self.first[cell], self.first[cell + 1])
        return tuple(zip(self.starts[rows].tolist(), self.stops[rows].tolist(), strict=True))

    def cell_of(self, coordinate: Sequence[int]) -> int:
        """The cell of a mesh coordinate."""
        cell = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            cell = cell * size + coordinate[axis]
        return cell

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        owner = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        order = np.argsort(self.starts, kind="stable")
        starts, stops = self.starts[order], self.stops[order]
        # The running maximum makes stops monotone, so that one binary search finds the first overlap even where
        # the intervals of different cells overlap each other.
        return starts, stops, np.maximum.accumulate(stops) if len(stops) else stops, owner[order]

    def overlaps(self, wanted: Intervals) -> dict[int, Intervals]:
        """Cells that share positions with `wanted`, ascending, each with the shared intervals in ascending order."""
        starts, stops, reach, owner = self._index
        found: dict[int, list[tuple[int, int]]] = {}
        for a, b in sorted(wanted):
            low = int(np.searchsorted(reach, a, side="right"))
            high = int(np.searchsorted(starts, b, side="left"))
            for start, stop, cell in zip(
                starts[low:high].tolist(), stops[low:high].tolist(), owner[low:high].tolist(), strict=True
            ):
                if stop > a:
                    found.setdefault(cell, []).append((max(start, a), min(stop, b)))
        return {cell: tuple(sorted(found[cell])) for cell in sorted(found)}

    @cached_property
    def disjoint(self) -> bool:
        """Whether no position belongs to two cells."""
        starts, _, reach, _ = self._index
        return bool(np.all(reach[:-1] <= starts[1:]))


def cut(size: int, placements: Sequence[object], mesh_sizes: Sequence[int], dim: int) -> Cells:
    """The cells of tensor dim `dim` with `size` positions."""
    axes = [i for i, p in enumerate(placements) if sharded_dim(p) == dim]
    # FSDP2 over tensor parallelism shards an already sharded parameter and calls the result _StridedShard: the later
    # mesh axes cut first, the strided one last.
    order = sorted(axes, key=lambda i: isinstance(placements[i], StridedShard))
    cells: list[Intervals] | None = None
    lows = np.zeros(1, np.int64)
    highs = np.full(1, size, np.int64)
    for axis in order:
        chunks, placement = mesh_sizes[axis], placements[axis]
        if isinstance(placement, RowSplit):
            cells = list(placement.intervals)
        elif cells is not None:
            cells = [narrow(rows, *chunk_bounds(extent(rows), chunks, i)) for rows in cells for i in range(chunks)]
        else:
            step = -((lows - highs) // chunks)
            edges = lows[:, None] + step[:, None] * np.arange(chunks + 1)
            edges = np.minimum(edges, highs[:, None])
            lows, highs = edges[:, :-1].ravel(), edges[:, 1:].ravel()
    shape = [mesh_sizes[i] for i in order]
    back = [order.index(i) for i in axes]
    sizes = tuple(mesh_sizes[i] for i in axes)
    numbers = np.arange(math.prod(shape)).reshape(shape).transpose(back).ravel() if order else np.zeros(1, np.int64)
    if cells is None:
        lows, highs = lows[numbers], highs[numbers]
        keep = highs > lows
        first = np.concatenate([[0], np.cumsum(keep)])
        return Cells(tuple(axes), sizes, lows[keep], highs[keep], first)
    cells = [cells[n] for n in numbers.tolist()]
    flat = np.array([edge for rows in cells for edge in rows], np.int64).reshape(-1, 2)
    first = np.concatenate([[0], np.cumsum([len(rows) for rows in cells])])
    return Cells(tuple(axes), sizes, flat[:, 0], flat[:, 1], first)
