"""TransferPlan: which pieces of which source rank make up each destination rank's share. Pure and deterministic.

Every rank computes the same plan without communication. A rank asks only for its own pieces: overlaps are found by
binary search over the cells of the other layout, so one rank among thousands plans in milliseconds.

The bytes are minimal: a destination receives exactly the elements that it keeps and does not already hold. Of the
source ranks that hold the same region (replicas) the sender is the one on the same node, then the least loaded, then
the lowest rank; larger pieces are assigned first (longest processing time).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hetmesh.errors import LayoutError
from hetmesh.layout.cells import Cells
from hetmesh.layout.hashing import memoized
from hetmesh.layout.intervals import Intervals, check_shape, extent, overlap
from hetmesh.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of elements that `dst` takes from `src` (from itself where both are equal: no bytes move).

    Attributes:
        index: per tensor dim the global intervals, ascending; the piece is their cartesian product.
    """

    src: int
    dst: int
    index: tuple[Intervals, ...]

    @property
    def numel(self) -> int:
        return math.prod(extent(rows) for rows in self.index)


@dataclass(frozen=True, eq=False)
class TransferStep:
    """One movement of elements between two layouts of the same tensor.

    Attributes:
        shape: global shape.
        src, dst: the layouts on both sides.
        summed: pieces of one destination are added onto zeros: the summands of a Partial source, or the gradients of
            rows that several consumers took. Otherwise every kept element comes from exactly one piece.
        ranks_per_node: for preferring senders on the destination's node; None treats all ranks alike.
    """

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    summed: bool
    ranks_per_node: int | None

    @cached_property
    def _sides(self) -> tuple[tuple[Cells, ...], tuple[Cells, ...]]:
        return self.src.cells(self.shape), self.dst.cells(self.shape)

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Ranks of both sides by what they hold: cell per dim, then Partial coordinates; replicas last. Those of
        the source with equal cells and coordinates are a group; its key ends with the tuple of the coordinates."""
        src_cells, dst_cells = self._sides
        return _by_content(self.src, src_cells), _by_content(self.dst, dst_cells)

    def keeps(self, rank: int) -> bool:
        """Whether `rank` takes elements: it is in the destination and, on Partial axes of it, at coordinate 0.

        (A Partial destination is made of the whole value on one coordinate and zeros on the others.)
        """
        coordinate = self.dst.mesh.coordinate(rank)
        return coordinate is not None and all(coordinate[i] == 0 for i in self.dst.partial_axes)

    @memoized
    def received(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that make up the share of destination `rank`, its own part included, by source cell."""
        if not self.keeps(rank):
            return ()
        src_cells, dst_cells = self._sides
        coordinate = self.dst.mesh.coordinate(rank) or ()
        kept = [cells.intervals(cells.cell_of(coordinate)) for cells in dst_cells]
        overlaps = [cells.overlaps(rows) for cells, rows in zip(src_cells, kept, strict=True)]
        # coordinates along the Partial axes of the source: each holds one summand of every element
        summands = list(itertools.product(*(range(self.src.mesh.sizes[i]) for i in self.src.partial_axes)))
        return tuple(
            Piece(self._sender((*(cell for cell, _ in shares), summand), rank), rank, tuple(rows for _, rows in shares))
            for shares in itertools.product(*(shared.items() for shared in overlaps))
            for summand in summands
        )

    @memoized
    def sent(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that source `rank` sends to other ranks, by destination rank."""
        if rank not in self.src.mesh:
            return ()
        coordinate = self.src.mesh.coordinate(rank) or ()
        cells = (c.cell_of(coordinate) for c in self._sides[0])
        key = (*cells, tuple(coordinate[i] for i in self.src.partial_axes))
        senders = self._senders(key) if self._tables[0].shape[-1] > 1 else {}
        takers = self._takers(key)
        return tuple(Piece(rank, d, index) for d, index in takers if d != rank and senders.get(d, rank) == rank)

    @memoized
    def _takers(self, key: tuple) -> list[tuple[int, tuple[Intervals, ...]]]:
        """Destination ranks that need something of source group `key`, ascending, with the shared intervals per dim."""
        src_cells, dst_cells = self._sides
        held = [cells.intervals(cell) for cells, cell in zip(src_cells, key, strict=False)]
        overlaps = [cells.overlaps(rows) for cells, rows in zip(dst_cells, held, strict=True)]
        takers = []
        for shares in itertools.product(*(shared.items() for shared in overlaps)):
            index = tuple(rows for _, rows in shares)
            kept = (*(cell for cell, _ in shares), *(0 for _ in self.dst.partial_axes))
            takers += [(dst, index) for dst in self._tables[1][kept].tolist()]
        return sorted(takers, key=lambda taker: taker[0])

    def _sender(self, key: tuple, dst: int) -> int:
        table, _ = self._tables
        if table.shape[-1] == 1:  # no replicas
            return int(table[(*key[:-1], *key[-1], 0)])
        return self._senders(key)[dst]

    @memoized
    def _senders(self, key: tuple) -> dict[int, int]:
        """Which member of a source group sends to which destination."""
        members = sorted(self._tables[0][(*key[:-1], *key[-1])].tolist())
        senders = {rank: rank for rank in members}
        takers = self._takers(key)
        pieces = sorted((-math.prod(map(extent, index)), dst) for dst, index in takers if dst not in senders)
        node = self.ranks_per_node
        if pieces and node is None and pieces[0][0] == pieces[-1][0]:
            # Equal pieces: least loaded, then lowest rank, is a round-robin.
            senders |= {dst: members[i % len(members)] for i, (_, dst) in enumerate(pieces)}
            return senders
        loads = _Loads(members, node)
        for size, dst in pieces:
            senders[dst] = loads.take(dst, -size)
        return senders

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of all destination ranks. For thousands of ranks ask `received(rank)` and `sent(rank)` instead."""
        return tuple(piece for rank in self.dst.mesh.ranks for piece in self.received(rank))

    def check(self) -> None:
        """Raise LayoutError unless every element that some destination keeps has exactly one source region."""
        for dim, (src, dst) in enumerate(zip(*self._sides, strict=True)):
            if not src.disjoint:
                raise LayoutError(f"source rows of dim {dim} belong to two coordinates of a RowSplit: {self.src}")
            missing = _uncovered(src, dst)
            if missing is not None:
                raise LayoutError(
                    f"dim {dim}: no source rank holds row {missing}, which the destination keeps: {self.dst}"
                )


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """How to turn layout `src` of a tensor into layout `dst`; made by `plan_transfer`.

    Attributes:
        steps: one movement; two where the source is Partial: the reduction inside the source mesh into
            `src.canonical(shape)`, where every element has one owner, then the move. No sums are formed on the way.
    """

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    steps: tuple[TransferStep, ...]

    @cached_property
    def is_identity(self) -> bool:
        """Whether every rank's share is the same on both sides, so that nothing is moved, copied or summed."""
        return self.src == self.dst and not self.src.partial_axes and not self.steps[0].summed

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of all steps, in order; see `TransferStep.pieces`."""
        return tuple(piece for step in self.steps for piece in step.pieces)

    def bytes_moved(self, itemsize: int) -> int:
        """Bytes that cross between two ranks, over all ranks and steps, for elements of `itemsize` bytes."""
        return itemsize * sum(piece.numel for piece in self.pieces if piece.src != piece.dst)

    def bytes_received(self, rank: int, itemsize: int) -> int:
        """Bytes that `rank` receives from other ranks."""
        pieces = (piece for step in self.steps for piece in step.received(rank))
        return itemsize * sum(piece.numel for piece in pieces if piece.src != rank)

    def transpose(self) -> TransferPlan:
        """The backward: the gradient of the destination, laid as `dst.gradient()`, back to `src.gradient()`.

        It is the exact adjoint, replicas counted once. Rows that nobody took get zeros, rows that several took the sum.
        """
        return plan_gradient(self.shape, self.dst.gradient(), self.src, ranks_per_node=self.steps[0].ranks_per_node)


# A plan with ragged rows among 8,192 ranks takes up to 10 MB with its layouts, and rows change at every step: keep what
# the microbatches in flight need, not a history.
_CACHED_PLANS = 128


def plan_transfer(shape: Sequence[int], src: Layout, dst: Layout, *, ranks_per_node: int | None = None) -> TransferPlan:
    """Plan the movement of a tensor of global `shape` from layout `src` to layout `dst`.

    Cached; computed identically on every rank. The bytes are the lower bound: what each destination rank keeps and
    does not already hold; from a Partial source p - 1 summands of every element, then the bound from its canonical
    layout.

    Args:
        ranks_per_node: prefer senders on the destination's node (consecutive ranks share one); None: all alike.

    Raises:
        LayoutError: a placement does not fit the shape, source coordinates overlap, the destination keeps rows that
            no source rank holds, or an argument is of the wrong kind.
    """
    for argument, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise LayoutError(f"plan_transfer: {argument} must be a hetmesh.Layout, got {layout!r}")
    return _plan_forward(check_shape(shape), src, dst, ranks_per_node)


@lru_cache(maxsize=_CACHED_PLANS)
def _plan_forward(shape: tuple[int, ...], src: Layout, dst: Layout, node: int | None) -> TransferPlan:
    plan = _plan(shape, src, dst, False, node)
    plan.steps[-1].check()
    return plan


@lru_cache(maxsize=_CACHED_PLANS)
def plan_gradient(
    shape: tuple[int, ...], gradient: Layout, src: Layout, *, ranks_per_node: int | None = None
) -> TransferPlan:
    """Plan the backward of a transfer whose source was `src`, for a destination gradient that lies as `gradient`.

    `gradient` is `dst.gradient()` or, where each replica holds only a summand of it, the same with Partial instead.
    """
    return _plan(check_shape(shape), gradient, src.gradient(), True, ranks_per_node)


def _plan(shape: tuple[int, ...], src: Layout, dst: Layout, adjoint: bool, node: int | None) -> TransferPlan:
    def overlaps(layout: Layout) -> bool:
        return adjoint and not all(cells.disjoint for cells in layout.cells(shape))

    if not src.partial_axes or overlaps(src):
        # Summands of rows that several coordinates took cannot be reduced by owner: an element has several. Every
        # contribution then goes straight to the destination, which adds them.
        summed = bool(src.partial_axes) or overlaps(src)
        return TransferPlan(shape, src, dst, (TransferStep(shape, src, dst, summed, node),))
    middle = src.canonical(shape)
    steps = (TransferStep(shape, src, middle, True, node), TransferStep(shape, middle, dst, False, node))
    return TransferPlan(shape, src, dst, steps)


def missing_elements(shape: tuple[int, ...], src: Layout, dst: Layout) -> int:
    """The fewest elements that must cross between ranks: what each destination rank keeps and does not hold.

    Counted from the intervals of both layouts, rank by rank, without any plan. Neither layout may be Partial.
    """
    if src.partial_axes or dst.partial_axes:
        raise LayoutError(f"elements that summands lack are not counted: {src} -> {dst}")
    return sum(lacking_elements(shape, src, dst, rank) for rank in dst.mesh.ranks)


def lacking_elements(shape: tuple[int, ...], src: Layout, dst: Layout, rank: int) -> int:
    """How many elements destination rank `rank` keeps and does not hold."""
    kept = [sorted(rows) for rows in dst.intervals(shape, rank)]
    held = [sorted(rows) for rows in src.intervals(shape, rank)] if rank in src.mesh else [()] * len(shape)
    return math.prod(map(extent, kept)) - math.prod(map(overlap, kept, held))


class _Loads:
    """Which of several ranks is least loaded (then lowest), on the asking rank's node if it has one there.

    Heaps, because a source that is replicated on half of thousands of ranks has thousands of members and consumers.
    """

    def __init__(self, members: Sequence[int], ranks_per_node: int | None) -> None:
        self.node = ranks_per_node
        self.load = dict.fromkeys(members, 0)
        self.everywhere = [(0, rank) for rank in members]  # sorted, so a heap
        self.by_node: dict[int, list[tuple[int, int]]] = {}
        if self.node:
            for rank in members:
                self.by_node.setdefault(rank // self.node, []).append((0, rank))

    def take(self, dst: int, size: int) -> int:
        """The rank that sends `size` elements to `dst`."""
        heap = (self.node and self.by_node.get(dst // self.node)) or self.everywhere
        while heap[0][0] != self.load[heap[0][1]]:  # entries of ranks that have been given more since
            heapq.heappop(heap)
        rank = heap[0][1]
        self.load[rank] += size
        for heap in (self.everywhere, *([self.by_node[rank // self.node]] if self.node else [])):
            heapq.heappush(heap, (self.load[rank], rank))
        return rank


def _by_content(layout: Layout, dims: Sequence[Cells]) -> np.ndarray:
    """The ranks of a layout as an array: one index per tensor dim (its cell), one per Partial axis, then replicas."""
    partial = layout.partial_axes
    order = [axis for cells in dims for axis in cells.axes] + [*partial]
    rest = [axis for axis in range(layout.mesh.ndim) if axis not in order]
    sizes = [math.prod(cells.sizes) for cells in dims] + [layout.mesh.sizes[axis] for axis in partial]
    return layout.mesh.array.transpose([*order, *rest]).reshape([*sizes, -1])


def _uncovered(src: Cells, dst: Cells) -> int | None:
    """The first position that `dst` keeps and disjoint `src` does not hold."""
    order = np.argsort(src.starts, kind="stable")
    starts, stops = src.starts[order], src.stops[order]
    begins = np.ones(len(starts), bool)  # a run of neighbours
    begins[1:] = starts[1:] != stops[:-1]
    first, end = np.append(-1, starts[begins]), np.append(-1, stops[np.roll(begins, -1)])
    held_to = np.maximum(end[np.searchsorted(first, dst.starts, side="right") - 1], dst.starts)
    short = held_to < dst.stops
    return int(held_to[short.argmax()]) if short.any() else None
