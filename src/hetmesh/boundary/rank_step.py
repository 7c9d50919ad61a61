"""RankStep: what one rank does in one step of a plan, computed once: whom it hears and tells, from where, to where.

A plan speaks of global intervals. Here they are blocks of this rank's contiguous tensors (sizes, strides, offset), so
that carrying out a plan again costs one torch call per block and no arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from hetmesh.boundary.log import Counted
from hetmesh.layout import Intervals, Piece, TransferStep
from hetmesh.layout.intervals import extent, locate


class Block(NamedTuple):
    """A rectangular part of a contiguous tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor, base: int = 0) -> Tensor:
        """The view of a contiguous tensor of any shape, which begins at element `base` of its storage."""
        return tensor.as_strided(self.size, self.stride, base + self.offset)


class LocalPiece(NamedTuple):
    """One piece on one side.

    Attributes:
        peer: the rank on the other side.
        numel: of the message.
        blocks: where it lies in the local tensor, in order.
        packed: the same blocks in the message, whose elements ascend along each dim.
        flat: whether it is one contiguous run of the local tensor, which can be the message itself.
        start: where the message begins among those that are not, which share one buffer.
    """

    peer: int
    numel: int
    blocks: tuple[Block, ...]
    packed: tuple[Block, ...]
    flat: bool
    start: int


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank does in one step.

    Attributes:
        source_shape, result_shape: of its local tensors; None outside the layout.
        fills: whether what is put in place (of added pieces the first) covers the result, which needs no zeros then.
        receives: by source rank.
        sends: in rotated order, so that the ranks do not all send to the same one first.
        own: what it holds and keeps: pairs of blocks of both tensors.
        order: where pieces are added, their source ranks in the plan's order, this one among them; else empty.
        messages: what the log counts: `received` or `sent`, the other rank, elements.
        received_packed, sent_packed: elements of the buffers that messages share which are not in place themselves.
    """

    source_shape: tuple[int, ...] | None
    result_shape: tuple[int, ...] | None
    fills: bool
    receives: tuple[LocalPiece, ...]
    sends: tuple[LocalPiece, ...]
    own: tuple[tuple[Block, Block], ...]
    order: tuple[int, ...]
    messages: tuple[Counted, ...]
    received_packed: int
    sent_packed: int


_made: WeakKeyDictionary[TransferStep, dict[int, RankStep]] = WeakKeyDictionary()  # they live as long as their plans


def rank_step(step: TransferStep, rank: int) -> RankStep:
    """What `rank` does in `step`; made once."""
    of_step = _made.setdefault(step, {})
    if rank not in of_step:
        of_step[rank] = _make(step, rank)
    return of_step[rank]


def _make(step: TransferStep, rank: int) -> RankStep:
    source = step.src.intervals(step.shape, rank) if rank in step.src.mesh else ()
    result = step.dst.intervals(step.shape, rank) if rank in step.dst.mesh else ()
    source_shape, result_shape = tuple(map(extent, source)), tuple(map(extent, result))
    received = step.received(rank)
    sizes = [piece.numel for piece in received]
    rotation = max(max(step.src.mesh.ranks), max(step.dst.mesh.ranks)) + 1
    incoming = sorted(((piece.src, piece) for piece in received if piece.src != rank), key=lambda item: item[0])
    outgoing = sorted(((p.dst, p) for p in step.sent(rank)), key=lambda item: (item[0] - rank) % rotation)
    receives, received_packed = _parts(incoming, result, result_shape, in_place=not step.summed)
    sends, sent_packed = _parts(outgoing, source, source_shape)
    local = (piece for piece in received if piece.src == rank)
    own = [pair for piece in local for pair in _common(piece, source, source_shape, result, result_shape)]
    return RankStep(
        source_shape if rank in step.src.mesh else None,
        result_shape if rank in step.dst.mesh else None,
        sum(sizes[:1] if step.summed else sizes) == math.prod(result_shape),
        receives,
        sends,
        tuple(own),
        tuple(piece.src for piece in received) if step.summed else (),
        (*(("received", p.peer, p.numel) for p in receives), *(("sent", p.peer, p.numel) for p in sends)),
        received_packed,
        sent_packed,
    )


def _parts(
    pieces: Iterable[tuple[int, Piece]], local: Sequence[Intervals], shape: tuple[int, ...], *, in_place: bool = True
) -> tuple[tuple[LocalPiece, ...], int]:
    """Where pieces lie in a local tensor of `shape` that holds the intervals `local`, and in a buffer that they share.

    Args:
        pieces: with the rank on the other side.
        in_place: whether those that are one run of the tensor do without a place in the buffer.

    Returns:
        The parts, and the elements of the buffer.
    """
    parts, start, strides = [], 0, contiguous_stride(shape)
    for peer, piece in pieces:
        ranges = [locate(rows, part) for rows, part in zip(local, piece.index, strict=True)]
        extents = tuple([extent(rows) for rows in ranges])
        numel = math.prod(extents)
        if all(len(rows) == 1 for rows in ranges):
            offset = sum([rows[0][0] * stride for rows, stride in zip(ranges, strides, strict=True)])
            flat = _is_run(extents, strides)
            size, stride = ((numel,), (1,)) if flat else (extents, strides)  # one dim will do
            blocks: tuple[Block, ...] = (Block(size, stride, offset),)
            packed: tuple[Block, ...] = (Block(size, contiguous_stride(size), 0),)
        else:
            flat = False
            blocks, packed = _several(ranges, extents, shape)
        flat = flat and in_place
        parts.append(LocalPiece(peer, numel, blocks, packed, flat, 0 if flat else start))
        start += 0 if flat else numel
    return tuple(parts), start


def _several(
    ranges: Sequence[Intervals], extents: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """A piece that is not one block, in its tensor and in its message."""
    starts = [list(itertools.accumulate((b - a for a, b in rows), initial=0)) for rows in ranges]
    blocks, packed = [], []
    for choice in itertools.product(*(range(len(rows)) for rows in ranges)):
        edges = [rows[i] for rows, i in zip(ranges, choice, strict=True)]
        size = tuple(b - a for a, b in edges)
        blocks.append(_block([a for a, _ in edges], size, shape))
        packed.append(_block([rows[i] for rows, i in zip(starts, choice, strict=True)], size, extents))
    return tuple(blocks), tuple(packed)


def _common(
    piece: Piece,
    source: Sequence[Intervals],
    source_shape: tuple[int, ...],
    result: Sequence[Intervals],
    result_shape: tuple[int, ...],
) -> Iterator[tuple[Block, Block]]:
    """Where a piece lies in two local tensors, cut so that every block is one in both."""
    dims = zip(source, result, piece.index, strict=True)
    runs = [list(_pairs(locate(a, part), locate(b, part))) for a, b, part in dims]
    for choice in itertools.product(*runs):
        size = tuple(length for _, _, length in choice)
        here = _block([start for start, _, _ in choice], size, source_shape)
        there = _block([start for _, start, _ in choice], size, result_shape)
        if _is_run(size, here.stride) and _is_run(size, there.stride):  # one dim will do
            length = (math.prod(size),)
            here, there = Block(length, (1,), here.offset), Block(length, (1,), there.offset)
        yield here, there


def _pairs(a: Intervals, b: Intervals) -> Iterator[tuple[int, int, int]]:
    """Two lists of ranges of equal total length, cut alike: starts in both, and length."""
    i = j = at = bt = 0
    while i < len(a) and j < len(b):
        start, other = a[i][0] + at, b[j][0] + bt
        length = min(a[i][1] - start, b[j][1] - other)
        yield start, other, length
        at, bt = at + length, bt + length
        if start + length == a[i][1]:
            i, at = i + 1, 0
        if other + length == b[j][1]:
            j, bt = j + 1, 0


def _block(starts: Sequence[int], size: tuple[int, ...], shape: tuple[int, ...]) -> Block:
    strides = contiguous_stride(shape)
    return Block(size, strides, sum(a * stride for a, stride in zip(starts, strides, strict=True)))


def _is_run(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a block of a row-major tensor has no gaps."""
    run = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n == 1:
            continue
        if step != run:
            return False
        run *= n
    return True


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a tensor of `shape`, as torch computes them (sizes of 0 count as 1)."""
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))
