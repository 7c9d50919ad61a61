"""How a tensor lies along one mesh axis: torch's placements, plus RowSplit for shares that no chunking describes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement

from hetmesh._torch_compat import StridedShard
from hetmesh.errors import LayoutError
from hetmesh.layout.hashing import HashedOnce
from hetmesh.layout.intervals import Interval, Intervals, whole_numbers


@dataclass(frozen=True)
class RowSplit(HashedOnce):
    """Explicit rows per coordinate of a mesh axis: ragged batches, balanced context parallelism, key/value fetch.

    Attributes:
        dim: the tensor dim that is split.
        intervals: for each coordinate of the mesh axis, its ordered `[start, stop)` intervals of that dim. Any order,
            empty coordinates allowed, no row twice within a coordinate. As a source, coordinates must be disjoint and
            hold every row that the destination keeps. As a destination they may leave rows out (these get a zero
            gradient) and may overlap (each holder is a separate consumer: their gradients are summed).
    """

    dim: int
    intervals: tuple[Intervals, ...]

    def __post_init__(self) -> None:
        # In arrays: among thousands of ranks this is made anew at every step, from tens of thousands of intervals.
        whole_numbers([self.dim], "RowSplit: the dim")
        try:
            lengths = [len(rows) for rows in self.intervals]
            numbers = chain.from_iterable(chain.from_iterable(self.intervals))
            edges = np.fromiter(map(operator.index, numbers), np.int64)
        except TypeError:
            raise LayoutError(
                f"RowSplit(dim={self.dim}): intervals are pairs [start, stop) of whole numbers, got {self.intervals}"
            ) from None
        if len(edges) != 2 * sum(lengths):
            raise LayoutError(f"RowSplit(dim={self.dim}): intervals are pairs [start, stop), got {self.intervals}")
        starts, stops, owner = edges[::2], edges[1::2], np.repeat(np.arange(len(lengths)), lengths)
        held = starts != stops
        starts, stops, owner = starts[held], stops[held], owner[held]
        order = np.lexsort((starts, owner))
        twice = (stops[order][:-1] > starts[order][1:]) & (owner[order][:-1] == owner[order][1:])
        wrong = [*owner[(starts < 0) | (stops < starts)], *owner[order][:-1][twice]]
        if wrong:
            coordinate = int(min(wrong))
            raise LayoutError(
                f"RowSplit(dim={self.dim}): coordinate {coordinate} must hold disjoint [start, stop) intervals "
                f"with 0 <= start <= stop, got {list(self.intervals[coordinate])}"
            )
        seam = np.append(True, (owner[1:] != owner[:-1]) | (starts[1:] != stops[:-1]))[: len(starts)]
        starts, stops, owner = starts[seam], stops[np.append(seam[1:], True)[: len(stops)]], owner[seam]
        first = np.searchsorted(owner, np.arange(len(lengths) + 1))
        pairs = list(zip(starts.tolist(), stops.tolist(), strict=True))
        clean = tuple(tuple(pairs[i:j]) for i, j in itertools.pairwise(first.tolist()))
        object.__setattr__(self, "intervals", clean)
        self.__dict__["arrays"] = (starts, stops, first)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Starts and stops of all intervals, coordinate by coordinate; those of c are `first[c]:first[c + 1]`."""
        return RowSplit(self.dim, self.intervals).arrays  # after a pickle; otherwise set when this was made

    @cached_property
    def _hash(self) -> int:
        return hash((self.dim, *(array.tobytes() for array in self.arrays)))

    __hash__ = HashedOnce.__hash__

    @classmethod
    def counts(cls, dim: int, counts: Iterable[int]) -> RowSplit:
        """Consecutive runs of the given lengths: `RowSplit.counts(0, [3, 0, 5])`."""
        rows: list[tuple[Interval, ...]] = []
        start = 0
        for count in whole_numbers(counts, "RowSplit: the counts"):
            rows.append(((start, start + count),))
            start += count
        return cls(dim, tuple(rows))

    def __repr__(self) -> str:
        shown = ", ".join(str(list(rows)) for rows in self.intervals[:4])
        return f"RowSplit(dim={self.dim}, {shown}{', ...' if len(self.intervals) > 4 else ''})"


Placement = TorchPlacement | RowSplit
"""What a Layout holds per mesh axis."""


def sharded_dim(placement: object) -> int | None:
    """The tensor dim that a placement splits, or None for Replicate and Partial."""
    return placement.dim if isinstance(placement, (Shard, StridedShard, RowSplit)) else None


def check_placements(placements: Sequence[object], axes: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise LayoutError for anything that hetmesh cannot move exactly, naming the mesh axis."""
    if len(placements) != len(axes):
        raise LayoutError(f"a layout needs one placement per mesh axis {tuple(axes)}, got {tuple(placements)}")
    strided: set[int] = set()
    for i, (placement, axis, size) in enumerate(zip(placements, axes, sizes, strict=True)):
        where = f"mesh axis {axis!r}: {placement}"
        dim = sharded_dim(placement)
        if dim is None and not isinstance(placement, (Replicate, Partial)):
            raise LayoutError(f"{where} is not a placement; valid are Shard, Replicate, Partial, RowSplit")
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise LayoutError(
                f"{where}: only Partial('sum') has an exact adjoint; reduce {placement.reduce_op!r} first"
            )
        if dim is not None and dim < 0:
            raise LayoutError(f"{where}: write the tensor dim as a number >= 0")
        if isinstance(placement, RowSplit):
            if len(placement.intervals) != size:
                raise LayoutError(f"{where} has {len(placement.intervals)} coordinates, the axis has {size}")
            if any(sharded_dim(p) == dim for p in placements[:i]):
                raise LayoutError(f"{where}: RowSplit names global rows, so it must be the first split of its dim")
        if isinstance(placement, StridedShard):
            later = math.prod(
                s for p, s in zip(placements[i + 1 :], sizes[i + 1 :], strict=True) if sharded_dim(p) == dim
            )
            if placement.split_factor != later or dim in strided:
                raise LayoutError(
                    f"{where}: legal strided shards have split_factor = product of the later axes that shard the same "
                    f"dim (here {later}), at most one per tensor dim"
                )
            if any(isinstance(p, RowSplit) and p.dim == dim for p in placements):
                raise LayoutError(f"{where}: a strided shard cannot be combined with RowSplit on the same dim")
            strided.add(placement.dim)
