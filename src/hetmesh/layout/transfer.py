"""TransferPlan: which pieces of which source rank make up each destination rank's share. Pure and deterministic.

Every rank computes the same plan without communication. A rank asks only for its own pieces: overlaps are found by
binary search over the cells of the other layout, so one rank among thousands plans in milliseconds.

The bytes are minimal: a destination receives exactly the elements that it keeps and does not already hold. Of the
source ranks that hold the same region (replicas) the sender is the one on the same node, then the least loaded, then
the lowest rank; larger pieces are assigned first (longest processing time).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hetmesh.errors import LayoutError
from hetmesh.layout.cells import Cells
from hetmesh.layout.intervals import Intervals, extent
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
        """Number of elements."""
        return math.prod(extent(rows) for rows in self.index)


@dataclass(frozen=True, eq=False)
class Step:
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
    def _received(self) -> dict[int, tuple[Piece, ...]]:
        return {}

    def keeps(self, rank: int) -> bool:
        """Whether `rank` takes elements: it is in the destination and, on Partial axes of it, at coordinate 0.

        (A Partial destination is made of the whole value on one coordinate and zeros on the others.)
        """
        coordinate = self.dst.mesh.coordinate(rank)
        return coordinate is not None and all(coordinate[i] == 0 for i in self.dst.partial_axes)

    def received(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that make up the share of destination `rank`, its own part included, by source cell."""
        if rank not in self._received:
            self._received[rank] = tuple(self._find_received(rank)) if self.keeps(rank) else ()
        return self._received[rank]

    def _find_received(self, rank: int) -> Iterator[Piece]:
        src_cells, dst_cells = self._sides
        coordinate = self.dst.mesh.coordinate(rank) or ()
        wanted = [cells.intervals(cells.cell_of(coordinate)) for cells in dst_cells]
        found = [cells.overlaps(rows) for cells, rows in zip(src_cells, wanted, strict=True)]
        summands = self._summands
        for key in itertools.product(*found):
            index = tuple(f[cell] for f, cell in zip(found, key, strict=True))
            for summand in summands:
                yield Piece(self._sender((*key, summand), rank), rank, index)

    def sent(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that source `rank` sends to other ranks, by destination rank."""
        if rank not in self.src.mesh:
            return ()
        key = self._group_of(rank)
        senders, _ = self._assignment(key)
        mine = (
            Piece(rank, dst, index)
            for dst_key, index in self._consumers(key)
            for dst in self._keepers(dst_key)
            if dst != rank and senders.get(dst, rank) == rank
        )
        return tuple(sorted(mine, key=lambda piece: piece.dst))

    @property
    def _summands(self) -> tuple[tuple[int, ...], ...]:
        """Coordinates along the Partial axes of the source: each holds one summand of every element."""
        axes = self.src.partial_axes
        return tuple(itertools.product(*(range(self.src.mesh.sizes[i]) for i in axes)))

    def _group_of(self, rank: int) -> tuple:
        coordinate = self.src.mesh.coordinate(rank) or ()
        cells = (c.cell_of(coordinate) for c in self._sides[0])
        return (*cells, tuple(coordinate[i] for i in self.src.partial_axes))

    def _members(self, key: tuple) -> list[int]:
        """Source ranks that hold the same region (and summand): cell per dim, then the Partial coordinates."""
        fixed = dict(zip(self.src.partial_axes, key[-1], strict=True))
        return _ranks_at(self.src, self._sides[0], key[:-1], fixed)

    def _keepers(self, cells: Sequence[int]) -> list[int]:
        """Destination ranks that keep the region given by one cell per dim."""
        return _ranks_at(self.dst, self._sides[1], cells, dict.fromkeys(self.dst.partial_axes, 0))

    def _consumers(self, key: tuple) -> Iterator[tuple[tuple[int, ...], tuple[Intervals, ...]]]:
        """Destination cells that need something of source group `key`, with the shared intervals per dim."""
        src_cells, dst_cells = self._sides
        held = [cells.intervals(cell) for cells, cell in zip(src_cells, key, strict=False)]
        found = [cells.overlaps(rows) for cells, rows in zip(dst_cells, held, strict=True)]
        for dst_key in itertools.product(*found):
            yield dst_key, tuple(f[cell] for f, cell in zip(found, dst_key, strict=True))

    def _sender(self, key: tuple, dst: int) -> int:
        senders, only = self._assignment(key)
        return senders[dst] if only is None else only

    @cached_property
    def _assignments(self) -> dict[tuple, tuple[dict[int, int], int | None]]:
        return {}

    def _assignment(self, key: tuple) -> tuple[dict[int, int], int | None]:
        """Which member of a group sends to which destination; `(…, only)` for a group of one."""
        if key not in self._assignments:
            members = self._members(key)
            if len(members) == 1:
                self._assignments[key] = ({}, members[0])
            else:
                self._assignments[key] = (self._balance(members, key), None)
        return self._assignments[key]

    def _balance(self, members: list[int], key: tuple) -> dict[int, int]:
        own = set(members)
        senders = {rank: rank for rank in members}
        pieces = []
        for cells, index in self._consumers(key):
            numel = math.prod(extent(rows) for rows in index)
            pieces += [(-numel, dst) for dst in self._keepers(cells) if dst not in own]
        pieces.sort()
        members = sorted(members)
        node = self.ranks_per_node
        if pieces and node is None and pieces[0][0] == pieces[-1][0]:
            # Equal pieces: least loaded, then lowest rank, is a round-robin.
            senders |= {dst: members[i % len(members)] for i, (_, dst) in enumerate(pieces)}
            return senders
        load = dict.fromkeys(members, 0)
        for size, dst in pieces:
            near = [m for m in members if node and m // node == dst // node] or members
            best = min(near, key=lambda m: (load[m], m))
            load[best] -= size
            senders[dst] = best
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
    steps: tuple[Step, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces of all steps, in order; see `Step.pieces`."""
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

        It is the exact adjoint, replicas counted once. Rows that nobody took get zeros; rows that several coordinates
        of a RowSplit took get the sum.
        """
        return plan_gradient(self.shape, self.dst.gradient(), self.src, ranks_per_node=self.steps[0].ranks_per_node)


@lru_cache(maxsize=1024)
def plan_transfer(
    shape: tuple[int, ...], src: Layout, dst: Layout, *, ranks_per_node: int | None = None
) -> TransferPlan:
    """Plan the movement of a tensor of global `shape` from layout `src` to layout `dst`.

    Cached; computed identically on every rank. The bytes are the lower bound: what each destination rank keeps and
    does not already hold; from a Partial source p - 1 summands of every element, then the bound from its canonical
    layout.

    Args:
        ranks_per_node: prefer senders on the destination's node (consecutive ranks share one); None: all alike.

    Raises:
        LayoutError: a placement does not fit the shape, source coordinates overlap, or the destination keeps rows
            that no source rank holds.
    """
    plan = _plan(tuple(shape), src, dst, False, ranks_per_node)
    plan.steps[-1].check()
    return plan


@lru_cache(maxsize=1024)
def plan_gradient(
    shape: tuple[int, ...], gradient: Layout, src: Layout, *, ranks_per_node: int | None = None
) -> TransferPlan:
    """Plan the backward of a transfer whose source was `src`, for a destination gradient that lies as `gradient`.

    `gradient` is `dst.gradient()` or, where each replica holds only a summand of it, the same with Partial instead.
    """
    return _plan(tuple(shape), gradient, src.gradient(), True, ranks_per_node)


def _plan(shape: tuple[int, ...], src: Layout, dst: Layout, adjoint: bool, node: int | None) -> TransferPlan:
    def overlaps(layout: Layout) -> bool:
        return adjoint and not all(cells.disjoint for cells in layout.cells(shape))

    if not src.partial_axes or overlaps(src):
        # Summands of rows that several coordinates took cannot be reduced by owner: an element has several. Every
        # contribution then goes straight to the destination, which adds them.
        summed = bool(src.partial_axes) or overlaps(src)
        return TransferPlan(shape, src, dst, (Step(shape, src, dst, summed, node),))
    middle = src.canonical(shape)
    steps = (Step(shape, src, middle, True, node), Step(shape, middle, dst, False, node))
    return TransferPlan(shape, src, dst, steps)


def _ranks_at(layout: Layout, dims: Sequence[Cells], key: Sequence[int], fixed: dict[int, int]) -> list[int]:
    index: list[int | slice] = [slice(None)] * layout.mesh.ndim
    index = [fixed.get(axis, rows) for axis, rows in enumerate(index)]
    for cells, cell in zip(dims, key, strict=True):
        for axis, coordinate in zip(
            cells.axes, np.unravel_index(cell, cells.sizes) if cells.sizes else (), strict=True
        ):
            index[axis] = int(coordinate)
    return np.atleast_1d(layout.mesh.array[tuple(index)]).ravel().tolist()


def _uncovered(src: Cells, dst: Cells) -> int | None:
    """The first position that `dst` keeps and disjoint `src` does not hold."""
    order = np.argsort(src.starts, kind="stable")
    starts, stops = src.starts[order], src.stops[order]
    held = np.concatenate([[0], np.cumsum(stops - starts)])

    def held_below(x: np.ndarray) -> np.ndarray:
        i = np.searchsorted(starts, x, side="right") - 1
        inside = np.where(
            i >= 0, np.minimum(x, stops[np.maximum(i, 0)] if len(stops) else x) - starts[np.maximum(i, 0)], 0
        )
        return held[np.maximum(i, 0)] + np.where(i >= 0, inside, 0)

    if not len(dst.starts):
        return None
    if not len(starts):
        return int(dst.starts[0])
    short = held_below(dst.stops) - held_below(dst.starts) < dst.stops - dst.starts
    if not short.any():
        return None
    a, b = int(dst.starts[short.argmax()]), int(dst.stops[short.argmax()])
    return next(x for x in range(a, b) if held_below(np.array([x + 1]))[0] == held_below(np.array([x]))[0])
