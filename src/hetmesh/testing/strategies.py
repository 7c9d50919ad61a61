"""Hypothesis strategies for meshes, shapes, layouts and pairs of layouts; all of them legal.

They reach the corners that hand-written tables miss: ranks permuted and with gaps, uneven and empty shards, ragged and
permuted RowSplits, stacked and strided shards, Partial, zero-size and 0-d tensors, and rank sets that are identical,
permuted, overlapping, disjoint or of sizes that do not divide each other. Examples shrink towards few ranks and axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh._torch_compat import StridedShard
from hetmesh.layout import Intervals, Layout, MeshSpec, Placement, RowSplit

_AXES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class LayoutPair:
    """A transfer to plan: global shape, source and destination."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout


@st.composite
def shapes(draw: st.DrawFn, *, min_dims: int = 1, max_dims: int = 3, max_side: int = 9) -> tuple[int, ...]:
    """Global shapes, one in ten or so with a dim of size 0; with `min_dims=0` also 0-d."""
    dims = draw(st.integers(min_dims, max_dims))
    shape = [draw(_counts(max_side)) for _ in range(dims)]
    if shape and draw(st.integers(0, 9)) == 9:
        shape[draw(st.integers(0, len(shape) - 1))] = 0
    return tuple(shape)


def mesh_specs(ranks: int | Sequence[int] = 8, *, max_axes: int = 3) -> st.SearchStrategy[MeshSpec]:
    """Meshes of 1 to `max_axes` axes (4 at most), some of size 1.

    Args:
        ranks: a world size: any of its ranks, in any order, with gaps. Or the very ranks, in this order.
        max_axes: most mesh axes.
    """
    if isinstance(ranks, int):
        subsets = st.integers(1, ranks).flatmap(lambda n: st.permutations(range(ranks)).map(lambda p: p[:n]))
        return subsets.flatmap(lambda chosen: mesh_specs(chosen, max_axes=max_axes))
    members = tuple(ranks)
    sizes = _factorisations(len(members), min(max_axes, len(_AXES)))
    sizes += 2 * [s for s in sizes if 1 not in s]  # axes of size 1 would be most of them
    return st.sampled_from(sizes).map(lambda s: MeshSpec(members, _AXES[: len(s)], s))


@st.composite
def row_splits(
    draw: st.DrawFn,
    dim: int,
    length: int,
    coordinates: int,
    *,
    exact: bool = True,
    within: tuple[int, int] | None = None,
) -> RowSplit:
    """Ragged RowSplits: rows in any order, several intervals per coordinate, empty coordinates.

    Args:
        dim, length: the tensor dim and its size.
        coordinates: size of the mesh axis.
        exact: every row belongs to exactly one coordinate, as a source needs. Otherwise rows may be left out and
            belong to several coordinates.
        within: `(start, stop)`, the rows to choose from; all of them by default.
    """
    start, stop = within or (0, length)
    cuts = sorted(draw(st.lists(st.integers(start, stop), max_size=2 * coordinates)))
    segments = [(a, b) for a, b in zip([start, *cuts], [*cuts, stop], strict=True) if a < b]
    rows: list[Intervals] = []
    if exact:
        owners = draw(st.lists(st.integers(0, coordinates - 1), min_size=len(segments), max_size=len(segments)))
        order = draw(st.permutations(list(zip(segments, owners, strict=True))))
        rows = [tuple(segment for segment, owner in order if owner == c) for c in range(coordinates)]
    elif segments:
        some = st.lists(st.sampled_from(segments), unique=True, min_size=1)
        rows = [() if draw(st.integers(0, 4)) == 4 else tuple(draw(some)) for _ in range(coordinates)]
    return RowSplit(dim, tuple(rows) or ((),) * coordinates)


@st.composite
def placements(
    draw: st.DrawFn,
    mesh: MeshSpec,
    shape: tuple[int, ...],
    *,
    partial: bool = True,
    rows: bool = True,
    strided: bool = True,
    exact: bool = True,
    within: tuple[int, tuple[int, int]] | None = None,
) -> tuple[Placement, ...]:
    """One placement per axis of `mesh`, together legal for a tensor of `shape`. Size 0 and uneven dims are fair game.

    Args:
        partial, rows, strided: whether Partial, RowSplit and `_StridedShard` may occur.
        exact: as in `row_splits`.
        within: `(dim, (start, stop))`: some axis is a RowSplit of `dim` that holds only rows from start to stop.

    A RowSplit is the first to split its dim: its rows are global.
    """
    kinds = [Replicate, *([Shard] * 3 if shape else []), *([Partial] if partial and shape else [])]
    if rows and shape:
        kinds.append(RowSplit)
    special = draw(st.integers(0, mesh.ndim - 1)) if within else None
    # Stacked shards of one dim are the hardest: uneven remainders in remainders, and the only place for strided ones.
    stacked = draw(st.integers(0, len(shape) - 1)) if shape and mesh.ndim > 1 and draw(st.integers(0, 2)) == 2 else None
    chosen: list[Placement] = []
    for axis, size in enumerate(mesh.sizes):
        kind = draw(st.sampled_from(kinds))
        if within and axis == special:
            dim, rows_to_use = within
            chosen.append(draw(row_splits(dim, shape[dim], size, exact=exact, within=rows_to_use)))
            continue
        if kind is Replicate or kind is Partial:
            chosen.append(kind())
            continue
        dim = draw(st.integers(0, len(shape) - 1)) if stacked is None else stacked
        if within and dim == within[0] and axis < (special or 0):
            chosen.append(Replicate())
        elif kind is RowSplit and all(getattr(p, "dim", None) != dim for p in chosen):
            chosen.append(draw(row_splits(dim, shape[dim], size, exact=exact)))
        else:
            chosen.append(Shard(dim))
    if strided:
        for dim in range(len(shape)):
            axes = [axis for axis, p in enumerate(chosen) if getattr(p, "dim", None) == dim]
            if len(axes) < 2 or isinstance(chosen[axes[0]], RowSplit):
                continue
            if (n := draw(st.integers(0, len(axes) - 1))) > 0:  # 0: none of them
                factor = math.prod(mesh.sizes[axis] for axis in axes[n:])
                chosen[axes[n - 1]] = StridedShard(dim, split_factor=factor)
    return tuple(chosen)


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    ranks: int | Sequence[int] = 8,
    *,
    max_axes: int = 3,
    partial: bool = True,
    rows: bool = True,
    strided: bool = True,
    exact: bool = True,
) -> Layout:
    """Layouts for a tensor of `shape`: `mesh_specs(ranks)` with `placements`, whose arguments these are."""
    mesh = draw(mesh_specs(ranks, max_axes=max_axes))
    return Layout(mesh, draw(placements(mesh, shape, partial=partial, rows=rows, strided=strided, exact=exact)))


@st.composite
def rank_pairs(draw: st.DrawFn, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two rank lists within `world`: identical, permuted, overlapping, disjoint, one inside the other, and of sizes
    that do not divide each other."""
    order = tuple(draw(st.permutations(range(world))))
    coprime = [(n, m) for n in range(2, world) for m in range(2, world) if n + m <= world + 1 and n % m and m % n]
    relations = ["overlapping", "any", "permuted", "identical"]
    relations += ["disjoint"] * (world >= 2) + ["not dividing"] * bool(coprime)
    relation = draw(st.sampled_from(relations))
    if relation == "disjoint":
        n = draw(_counts(world - 1))
        return order[:n], order[n : n + draw(_counts(world - n))]
    if relation == "not dividing":
        n, m = draw(st.sampled_from(coprime))
        return order[:n], order[world - m :]
    n = draw(_counts(world))
    if relation == "identical":
        return order[:n], order[:n]
    if relation == "permuted":
        return order[:n], tuple(draw(st.permutations(order[:n])))
    if relation == "overlapping":
        first = draw(st.integers(0, n - 1))
        return order[:n], order[first : first + draw(_counts(world - first))]
    return order[:n], tuple(draw(st.permutations(range(world))))[: draw(_counts(world))]


def _counts(most: int) -> st.SearchStrategy[int]:
    """1 to `most`, seldom 1: a single rank or row has little to say. Shrinks to 1 all the same."""
    return st.sampled_from([1, *range(2, most + 1), *range(2, most + 1)])


@st.composite
def layout_pairs(
    draw: st.DrawFn,
    world: int = 8,
    *,
    max_axes: int = 3,
    max_side: int = 9,
    partial_source: bool = True,
    partial_destination: bool = True,
    rows: bool = True,
    strided: bool = True,
) -> LayoutPair:
    """Transfers that can be planned: the source holds every row that the destination keeps.

    Args:
        world: ranks 0 to world - 1.
        max_axes, max_side: most mesh axes, longest tensor dim.
        partial_source, partial_destination, rows, strided: whether such placements may occur. With all of them False
            both sides are plain Shard and Replicate.
    """
    shape = draw(shapes(max_side=max_side))
    src_ranks, dst_ranks = draw(rank_pairs(world))
    src_mesh = draw(mesh_specs(src_ranks, max_axes=max_axes))
    dst_mesh = draw(mesh_specs(dst_ranks, max_axes=max_axes))
    within = None
    if rows and draw(st.integers(0, 3)) == 3:  # both sides leave rows out: a source need not hold what nobody keeps
        dim = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, max(0, shape[dim] - 1)))
        within = (dim, (start, draw(st.integers(min(start + 1, shape[dim]), shape[dim]))))
    options: dict[str, Any] = {"rows": rows, "strided": strided, "within": within}
    src = draw(placements(src_mesh, shape, partial=partial_source, exact=True, **options))
    dst = draw(placements(dst_mesh, shape, partial=partial_destination, exact=False, **options))
    return LayoutPair(shape, Layout(src_mesh, src), Layout(dst_mesh, dst))


def _factorisations(n: int, most: int) -> list[tuple[int, ...]]:
    """Axis sizes with product n: one axis first, as the simplest."""
    if most == 1:
        return [(n,)]
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    more = [(d, *rest) for d in divisors for rest in _factorisations(n // d, most - 1)]
    return sorted({(n,), *more}, key=lambda sizes: (len(sizes), sizes))
