"""Pieces of local tensors to and from messages, for the two ways that are not hetmesh's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hetmesh.layout.intervals import Intervals, extent, locate


def view(local: Tensor, held: Sequence[Intervals], index: Sequence[Intervals]) -> Tensor | None:
    """The piece `index` of a local tensor that holds `held`, as a view; None where it is not one block."""
    for dim, (rows, wanted) in enumerate(zip(held, index, strict=True)):
        ranges = locate(rows, wanted)
        if len(ranges) != 1:
            return None
        local = _cut(local, dim, *ranges[0])
    return local


def take(local: Tensor, held: Sequence[Intervals], index: Sequence[Intervals]) -> Tensor:
    """The piece `index` as a contiguous tensor whose elements are in ascending global order along each dim."""
    for dim, (rows, wanted) in enumerate(zip(held, index, strict=True)):
        ranges = locate(rows, wanted)
        if len(ranges) == 1:
            local = _cut(local, dim, *ranges[0])
        else:
            local = torch.cat([local.narrow(dim, a, b - a) for a, b in ranges], dim)
    return local.contiguous()


def put(local: Tensor, held: Sequence[Intervals], index: Sequence[Intervals], piece: Tensor, *, add: bool) -> None:
    """Write `piece` (as `take` made it) to its place in `local`, or add it there."""
    blocks = []
    for rows, wanted in zip(held, index, strict=True):
        offset, ranges = 0, []
        for a, b in locate(rows, wanted):
            ranges.append((a, offset, b - a))
            offset += b - a
        blocks.append(ranges)
    for block in itertools.product(*blocks):
        target, source = local, piece
        for dim, (at, offset, length) in enumerate(block):
            target = _cut(target, dim, at, at + length)
            source = _cut(source, dim, offset, offset + length)
        if add:
            target.add_(source)
        else:
            target.copy_(source)


def _cut(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """`tensor` from `start` to `stop` along `dim`; itself where that is all of it, as it mostly is."""
    return tensor if stop - start == tensor.shape[dim] else tensor.narrow(dim, start, stop - start)


def piece_shape(index: Sequence[Intervals]) -> tuple[int, ...]:
    """Shape of the tensor that `take` returns."""
    return tuple(extent(rows) for rows in index)
