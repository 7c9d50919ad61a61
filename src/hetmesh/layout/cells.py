"""Cells: how one tensor dim is cut by a layout, as arrays with an index that finds overlaps without looping over ranks.

Mistakes this prevents: a rank's region depends only on its coordinates along the axes that shard a dim, so replicas
share one cell and a plan never enumerates rank pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh._torch_compat import StridedShard
from hetmesh.layout.intervals import Intervals
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
    def extents(self) -> np.ndarray:
        """Positions per cell."""
        return np.diff(np.append(0, np.cumsum(self.stops - self.starts))[self.first])

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
    starts, stops = np.zeros(1, np.int64), np.full(1, size, np.int64)
    owner, cells = np.zeros(1, np.int64), 1
    if not size:
        starts, stops, owner = starts[:0], stops[:0], owner[:0]
    for axis in order:
        placement, chunks = placements[axis], mesh_sizes[axis]
        if isinstance(placement, RowSplit):  # the first of its dim
            starts, stops, first = placement.arrays
            owner = np.repeat(np.arange(chunks), np.diff(first))
        else:
            starts, stops, owner = _chunk(starts, stops, owner, cells, chunks)
        cells *= chunks
    if order != axes:  # number the cells by ascending axes
        shape = [mesh_sizes[i] for i in order]
        moved = np.arange(cells).reshape(shape).transpose([order.index(i) for i in axes]).ravel()
        owner = np.argsort(moved)[owner]
        sort = np.argsort(owner, kind="stable")
        starts, stops, owner = starts[sort], stops[sort], owner[sort]
    sizes = tuple(mesh_sizes[i] for i in axes)
    return Cells(tuple(axes), sizes, starts, stops, np.searchsorted(owner, np.arange(cells + 1)))


def _chunk(
    starts: np.ndarray, stops: np.ndarray, owner: np.ndarray, cells: int, chunks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the concatenation of each cell's intervals as `torch.chunk` does: ceil(extent / chunks) until none are left.

    Chunk i of cell c becomes cell `c * chunks + i`. No interval is empty, before and after.
    """
    length = stops - starts
    ends = np.cumsum(length)
    seams = np.searchsorted(owner, np.arange(cells + 1))
    edges = np.append(0, ends)[seams]
    step = -(-np.diff(edges) // chunks)[owner]
    low = ends - length - edges[owner]  # position in the cell's concatenation
    parts = (low + length - 1) // step - low // step + 1
    whole = np.repeat(np.arange(len(starts)), parts)  # the interval that each part comes from
    chunk = (low // step)[whole] + np.arange(len(whole)) - np.repeat(np.cumsum(parts) - parts, parts)
    step, low, starts = step[whole], low[whole], starts[whole]
    first, last = np.maximum(chunk * step, low), np.minimum((chunk + 1) * step, low + length[whole])
    return starts + first - low, starts + last - low, owner[whole] * chunks + chunk
