"""Runs transfer plans in one process over {rank: CPU tensor}: simple, obviously right, no torch.distributed.

It says what a plan means. Elements are looked up by their number in the brute force of `bounds`, not in the intervals
that the planner used, so a plan that names the wrong elements cannot come out right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch.distributed.tensor import Partial, Replicate

from hetmesh.layout import Layout, Piece, TransferStep
from hetmesh.testing.bounds import element_ids


def scatter(value: torch.Tensor, layout: Layout, *, seed: int = 0) -> dict[int, torch.Tensor]:
    """Every rank's local tensor of the global `value`.

    Along Partial axes the value is the sum of random summands: exact for integers, and for floating-point values that
    are small integers. All summands but the last are integers from -999 to -1, so that none is zero where the value
    is positive, and a test notices if one is lost.
    """
    flat = value.reshape(-1)
    rng = np.random.default_rng(seed)
    partial = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    summands = list(np.ndindex(*(layout.mesh.sizes[axis] for axis in partial)))
    parts = {key: torch.from_numpy(rng.integers(-999, 0, flat.numel())).to(value.dtype) for key in summands[:-1]}
    parts[summands[-1]] = flat - sum(parts.values(), torch.zeros_like(flat))
    out = {}
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank) or ()
        part = parts[tuple(coordinate[axis] for axis in partial)]
        out[rank] = part[torch.from_numpy(element_ids(tuple(value.shape), layout, rank))]
    return out


def gather(tensors: Mapping[int, torch.Tensor], layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """The global tensor: summands are added up, replicas counted once.

    Elements that nobody holds are zero; elements that several coordinates of a RowSplit hold are summed, which is the
    gradient's meaning of such a layout.
    """
    dtype = next(iter(tensors.values())).dtype
    value = torch.zeros(math.prod(shape), dtype=dtype)
    for rank in _one_per_replica(layout):
        value.index_add_(0, torch.from_numpy(element_ids(shape, layout, rank)).ravel(), tensors[rank].reshape(-1))
    return value.reshape(shape)


def draw(layout: Layout, shape: tuple[int, ...], *, seed: int = 0) -> dict[int, torch.Tensor]:
    """Random local tensors: equal on replicas, independent everywhere else.

    The values are float64 integers, not zero and below 1000: sums of products stay exact, and nothing lost goes unseen.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[tuple[int, ...], torch.Tensor] = {}
    out = {}
    for rank in layout.mesh.ranks:
        key = _without_replicas(layout, rank)
        if key not in drawn:
            ids = element_ids(shape, layout, rank)
            values = rng.integers(1, 1000, ids.size) * rng.choice([-1, 1], ids.size)
            drawn[key] = torch.from_numpy(values).double().reshape(ids.shape)
        out[rank] = drawn[key].clone()
    return out


def inner(a: Mapping[int, torch.Tensor], b: Mapping[int, torch.Tensor], layout: Layout) -> float:
    """The inner product of two tensors that lie as `layout`, replicas counted once."""
    return sum(float((a[rank] * b[rank]).sum()) for rank in _one_per_replica(layout))


def execute(steps: Iterable[TransferStep], tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Run `plan.steps` on the local tensors of the source ranks.

    Returns:
        The local tensor of every destination rank. What no piece brings is zero.

    Raises:
        AssertionError: a tensor has not its rank's shape; a piece names elements that its source does not hold or its
            destination does not keep; or, in a step that does not sum, two pieces bring one element.
    """
    tensors = dict(tensors)
    for step in steps:
        tensors = _move(step, tensors)
    return tensors


def _move(step: TransferStep, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    flat = {}
    for rank in step.src.mesh.ranks:
        expected = element_ids(step.shape, step.src, rank).shape
        assert tuple(tensors[rank].shape) == expected, f"rank {rank} holds {tuple(tensors[rank].shape)}, not {expected}"
        flat[rank] = tensors[rank].detach().reshape(-1).numpy()
    where_src, where_dst = _positions(step.shape, step.src), _positions(step.shape, step.dst)
    dtype = next(iter(flat.values())).dtype
    out = {rank: np.zeros(element_ids(step.shape, step.dst, rank).shape, dtype) for rank in step.dst.mesh.ranks}
    brought = {rank: np.zeros(out[rank].size, np.int64) for rank in out}
    for piece in step.pieces:
        ids = _piece_ids(step.shape, piece)
        at_src, at_dst = where_src[piece.src][ids], where_dst[piece.dst][ids]
        assert (at_src >= 0).all(), f"{piece}: rank {piece.src} does not hold all of it"
        assert (at_dst >= 0).all(), f"{piece}: rank {piece.dst} does not keep all of it"
        brought[piece.dst][at_dst] += 1
        out[piece.dst].reshape(-1)[at_dst] += flat[piece.src][at_src]
    if not step.summed:
        for rank, count in brought.items():
            assert (count <= 1).all(), f"rank {rank} gets an element {count.max()} times in a step that does not sum"
    return {rank: torch.from_numpy(array) for rank, array in out.items()}


@lru_cache(maxsize=256)
def _positions(shape: tuple[int, ...], layout: Layout) -> dict[int, np.ndarray]:
    """Per rank: element number -> position in the flat local tensor, -1 where the rank does not hold the element."""
    out = {}
    for rank in layout.mesh.ranks:
        ids = element_ids(shape, layout, rank).ravel()
        out[rank] = np.full(math.prod(shape), -1)
        out[rank][ids] = np.arange(ids.size)
    return out


def _piece_ids(shape: tuple[int, ...], piece: Piece) -> np.ndarray:
    rows = [np.concatenate([np.arange(a, b) for a, b in dim] or [np.arange(0)]) for dim in piece.index]
    return np.arange(math.prod(shape)).reshape(shape)[np.ix_(*rows)].ravel()


def _without_replicas(layout: Layout, rank: int) -> tuple[int, ...]:
    coordinate = layout.mesh.coordinate(rank) or ()
    return tuple(0 if isinstance(p, Replicate) else c for c, p in zip(coordinate, layout.placements, strict=True))


def _one_per_replica(layout: Layout) -> list[int]:
    return [rank for rank in layout.mesh.ranks if layout.mesh.coordinate(rank) == _without_replicas(layout, rank)]
