"""The fewest bytes that a transfer can move, by brute force over single elements.

An oracle must not share code with what it judges. So this file uses neither the planner nor Layout's own intervals: it
cuts an array of element numbers the way the placements are defined, and counts. Elements are numbered row-major.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh._torch_compat import StridedShard
from hetmesh.layout import Layout, RowSplit


def element_ids(shape: tuple[int, ...], layout: Layout, rank: int) -> np.ndarray:
    """The numbers of the elements that `rank` holds: int64, of the shape and in the order of its local tensor.

    For a rank along a Partial axis these are the elements that it holds a summand of. The array is shared: leave it
    as it is.
    """
    return _held(tuple(shape), layout)[rank].numpy()


@lru_cache(maxsize=256)
def _held(shape: tuple[int, ...], layout: Layout) -> dict[int, torch.Tensor]:
    sizes = layout.mesh.sizes
    shares = {(0,) * len(sizes): torch.arange(math.prod(shape)).reshape(shape)}  # coordinate -> elements
    # A strided shard is what FSDP2 makes of a parameter that later mesh axes have already cut: it cuts last.
    for axis in sorted(range(len(sizes)), key=lambda axis: isinstance(layout.placements[axis], StridedShard)):
        shares = {
            (*coordinate[:axis], i, *coordinate[axis + 1 :]): part
            for coordinate, ids in shares.items()
            for i, part in enumerate(_split(ids, layout.placements[axis], sizes[axis]))
        }
    ranks = np.array(layout.mesh.ranks).reshape(sizes)
    return {int(ranks[coordinate]): ids for coordinate, ids in shares.items()}


def _split(ids: torch.Tensor, placement: object, size: int) -> list[torch.Tensor]:
    """The shares of the coordinates of one mesh axis."""
    if isinstance(placement, Shard | StridedShard):
        return _chunk(ids, size, placement.dim)
    if isinstance(placement, RowSplit):
        rows = [[row for start, stop in held for row in range(start, stop)] for held in placement.intervals]
        return [ids.index_select(placement.dim, torch.tensor(some, dtype=torch.int64)) for some in rows]
    assert isinstance(placement, Replicate | Partial)
    return [ids] * size


def _chunk(ids: torch.Tensor, chunks: int, dim: int) -> list[torch.Tensor]:
    """DTensor's shares: torch.chunk's, and empty ones where torch.chunk makes too few."""
    parts = list(torch.chunk(ids, chunks, dim))
    return parts + [ids.narrow(dim, 0, 0)] * (chunks - len(parts))


def kept_ids(shape: tuple[int, ...], layout: Layout, rank: int) -> np.ndarray:
    """The elements that `rank` must end up with in a destination: those it holds, or none for a rank that is not at
    coordinate 0 of every Partial axis. (A Partial destination is the value at coordinate 0 and zeros elsewhere.)"""
    ids = element_ids(shape, layout, rank)
    return ids if all(_coordinate(layout, rank)[axis] == 0 for axis in _axes(layout, Partial)) else ids.ravel()[:0]


def owned_ids(shape: tuple[int, ...], layout: Layout) -> dict[int, np.ndarray]:
    """Per rank the elements that it owns once a Partial layout has been reduced to its canonical layout.

    Replicate and Partial axes cut what the other axes left along one tensor dim, axis by axis: the longest dim that
    all these axes together divide on every rank, or else the longest (the first of several).
    """
    held = _held(tuple(shape), layout)
    axes = sorted(_axes(layout, Partial) + _axes(layout, Replicate))
    parts = math.prod(layout.mesh.sizes[axis] for axis in axes)
    longest = [max(ids.shape[dim] for ids in held.values()) for dim in range(len(shape))]
    even = [dim for dim in range(len(shape)) if all(ids.shape[dim] % parts == 0 for ids in held.values())]
    dim = max(even or range(len(shape)), key=lambda d: longest[d])  # max returns the first of equals
    for axis in axes:
        size = layout.mesh.sizes[axis]
        held = {rank: _chunk(ids, size, dim)[_coordinate(layout, rank)[axis]] for rank, ids in held.items()}
    return {rank: ids.numpy() for rank, ids in held.items()}


def minimal_elements(shape: tuple[int, ...], src: Layout, dst: Layout) -> dict[int, int]:
    """The fewest elements that each rank of either mesh must receive from other ranks.

    A destination rank receives what it keeps and does not hold already. Before that, every owner of a Partial source
    receives the p - 1 summands that it does not hold of each element that it owns in the canonical layout.
    """
    received = dict.fromkeys((*src.mesh.ranks, *dst.mesh.ranks), 0)
    if partial := _axes(src, Partial):
        held = owned_ids(shape, src)
        others = math.prod(src.mesh.sizes[axis] for axis in partial) - 1
        for rank, ids in held.items():
            received[rank] += others * ids.size
    else:
        held = {rank: element_ids(shape, src, rank) for rank in src.mesh.ranks}
    for rank in dst.mesh.ranks:
        has = np.zeros(math.prod(shape), bool)
        if rank in held:
            has[held[rank].ravel()] = True
        received[rank] += int(np.count_nonzero(~has[kept_ids(shape, dst, rank).ravel()]))
    return received


def minimal_bytes(shape: tuple[int, ...], src: Layout, dst: Layout, itemsize: int) -> int:
    """The fewest bytes that all ranks together must receive: see `minimal_elements`; `itemsize` bytes an element."""
    return itemsize * sum(minimal_elements(shape, src, dst).values())


def _coordinate(layout: Layout, rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(layout.mesh.ranks.index(rank), layout.mesh.sizes))


def _axes(layout: Layout, kind: type) -> list[int]:
    return [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, kind)]
