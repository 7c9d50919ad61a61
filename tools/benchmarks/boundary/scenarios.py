"""The boundaries that the benchmark moves: layout pairs as modules of real models have them, on 8 ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard

from benchmarks.boundary.out_of_llm import CASES
from hetmesh._torch_compat import StridedShard
from hetmesh.layout import Layout, MeshSpec, Placement, RowSplit

RANKS = 8
ITEMSIZE = 4  # float32
LARGE = 16 * 2**20  # bytes of the tensors that the time target is about

LANE_AXES = ("dp",)
"""Mesh axes that hold different samples; the ranks along the others form one lane."""


@dataclass(frozen=True)
class Transfer:
    """One direction of a boundary.

    Attributes:
        shape: global shape, float32.
    """

    name: str
    direction: str
    shape: tuple[int, ...]
    src: Layout
    dst: Layout

    @property
    def bytes(self) -> int:
        """Size of the global tensor."""
        return ITEMSIZE * math.prod(self.shape)

    @property
    def has_target(self) -> bool:
        """Whether the time target holds: a large tensor, no sums, and no rank that keeps everything."""
        whole = all(self.dst.local_shape(self.shape, rank) == self.shape for rank in self.dst.mesh.ranks)
        return self.bytes >= LARGE and not self.src.partial_axes and not whole


@dataclass(frozen=True)
class Scenario:
    """A boundary: what the source module emits and what the destination module keeps."""

    name: str
    shape: tuple[int, ...]
    src: Layout
    dst: Layout

    @property
    def directions(self) -> tuple[Transfer, Transfer]:
        """Forward, and backward: the gradient of the destination to the gradient of the source."""
        back = (self.dst.gradient(), self.src.gradient())
        return (
            Transfer(self.name, "forward", self.shape, self.src, self.dst),
            Transfer(self.name, "backward", self.shape, *back),
        )


def layout(ranks: Iterable[int], placements: Iterable[Placement], /, **sizes: int) -> Layout:
    """`layout(range(4), [Shard(0), Replicate()], dp=2, tp=2)`."""
    return Layout(MeshSpec.make(ranks, **sizes), tuple(placements))


def large() -> list[Scenario]:
    """All scenarios with a tensor of 16 MB: [rows, features] or [samples, positions, features]."""
    rows, batch = (4096, 1024), (32, 128, 1024)
    everyone = range(RANKS)
    dp8 = layout(everyone, [Shard(0)], dp=8)
    samples, lanes = _ragged(rows[0])
    zigzag = RowSplit(1, (((0, 32), (96, 128)), ((32, 96),)))
    strided = [StridedShard(0, split_factor=2), Shard(0)]
    return [
        Scenario("colocated DP8 -> DP2 x TP4, sequence-sharded", batch, dp8, _dp_tp(everyone, 2, 4, Shard(1))),
        Scenario("colocated DP8 -> DP2 x TP4, replicated", rows, dp8, _dp_tp(everyone, 2, 4, Replicate())),
        Scenario("colocated DP2 x TP4, replicated -> DP8", rows, _dp_tp(everyone, 2, 4, Replicate()), dp8),
        Scenario(
            "colocated DP8 -> DP2 x CP2 zigzag x TP2, replicated",
            batch,
            dp8,
            layout(everyone, [Shard(0), zigzag, Replicate()], dp=2, cp=2, tp=2),
        ),
        Scenario("colocated DP8 -> TP8 on features", rows, dp8, _tp(everyone, Shard(1))),
        Scenario("disjoint DP4 -> DP4", rows, _dp(range(4)), _dp(range(4, 8))),
        Scenario("disjoint DP4 -> TP4 on features", rows, _dp(range(4)), _tp(range(4, 8), Shard(1))),
        Scenario("disjoint DP4 -> DP2 x TP2, replicated", rows, _dp(range(4)), _dp_tp(range(4, 8), 2, 2, Replicate())),
        Scenario("disjoint DP4 -> DP2 x TP2, sequence-sharded", batch, _dp(range(4)), _dp_tp(range(4, 8), 2, 2)),
        Scenario("disjoint 5 -> 3", rows, _dp(range(5)), _dp(range(5, 8))),
        Scenario("overlapping 3 -> 2", rows, _dp(range(3)), _dp([2, 3])),
        Scenario("overlapping DP6 -> DP2 x TP2, sequence-sharded", batch, _dp(range(6)), _dp_tp(range(4, 8), 2, 2)),
        Scenario("ragged 5 lanes, 2 empty -> 3 lanes, shuffled samples", rows, *samples),
        Scenario("ragged DP8 -> DP4 x TP2, sequence-sharded, 1 empty lane", rows, *lanes),
        Scenario("permuted ranks", rows, dp8, _dp([3, 6, 0, 5, 1, 7, 2, 4])),
        Scenario("strided DP2 x TP2 -> disjoint DP4", rows, layout(range(4), strided, dp=2, tp=2), _dp(range(4, 8))),
        Scenario("disjoint DP4 -> TP4, all replicated", rows, _dp(range(4)), _tp(range(4, 8), Replicate())),
        Scenario("colocated TP8 sequence shards -> replicated", rows, _tp(everyone, Shard(0)), _tp(everyone)),
        Scenario("Partial TP4 -> disjoint DP4", rows, _tp(range(4), Partial()), _dp(range(4, 8))),
        Scenario(
            "Partial TP2 x 2 replicas -> disjoint DP2 x TP2, sequence-sharded",
            batch,
            layout(range(4), [Replicate(), Partial()], dp=2, tp=2),
            _dp_tp(range(4, 8), 2, 2),
        ),
    ]


def small() -> list[Scenario]:
    """Tensors of a few KB: fixed costs, and hidden states of the LLM that a generator reads."""
    rows, batch = (96, 64), (8, 12, 64)
    samples, lanes = _ragged(rows[0])
    dp8 = layout(range(8), [Shard(0)], dp=8)
    return [
        Scenario("small colocated DP8 -> DP2 x TP4, sequence-sharded", batch, dp8, _dp_tp(range(8), 2, 4, Shard(1))),
        Scenario("small colocated DP8 -> TP8 on features", rows, dp8, _tp(range(8), Shard(1))),
        Scenario("small disjoint DP4 -> DP4", rows, _dp(range(4)), _dp(range(4, 8))),
        Scenario("small disjoint 5 -> 3, uneven", (97, 63), _dp(range(5)), _dp(range(5, 8))),
        Scenario("small ragged 5 lanes, 2 empty -> 3 lanes, shuffled samples", rows, *samples),
        Scenario("small ragged DP8 -> DP4 x TP2, sequence-sharded, 1 empty lane", rows, *lanes),
        Scenario("small Partial TP4 -> disjoint DP4", rows, _tp(range(4), Partial()), _dp(range(4, 8))),
        *(Scenario(f"small, out of the LLM, {case.name}", *case.layouts()) for case in CASES),
    ]


def _dp(ranks: Iterable[int]) -> Layout:
    ranks = tuple(ranks)
    return layout(ranks, [Shard(0)], dp=len(ranks))


def _tp(ranks: Iterable[int], placement: Placement | None = None) -> Layout:
    ranks = tuple(ranks)
    return layout(ranks, [placement or Replicate()], tp=len(ranks))


def _dp_tp(ranks: Iterable[int], dp: int, tp: int, over_tp: Placement | None = None) -> Layout:
    """Samples (dim 0) over dp; over tp positions (dim 1) by default."""
    return layout(ranks, [Shard(0), over_tp or Shard(1)], dp=dp, tp=tp)


def _ragged(rows: int) -> tuple[tuple[Layout, Layout], tuple[Layout, Layout]]:
    """Lanes with unequal rows, some with none: shuffled samples 5 -> 3, and runs DP8 -> DP4 x TP2."""
    unit = rows // 32
    # Twelve samples of unequal length; the source's lanes take them in another order than the destination's.
    starts = [unit * n for n in (0, 1, 5, 7, 8, 12, 15, 16, 20, 23, 26, 29, 32)]
    sample = [(a, b) for a, b in zip(starts, [*starts[1:-1], rows], strict=False)]
    give = RowSplit(
        0, tuple(tuple(sample[i] for i in some) for some in ((0, 3, 4, 9), (), (1, 6, 7, 8, 11), (), (2, 5, 10)))
    )
    take = RowSplit(0, tuple(tuple(sample[i] for i in some) for some in ((1, 3, 5, 11), (0, 6, 8, 10), (2, 4, 7, 9))))
    shuffled = layout(range(5), [give], dp=5), layout(range(5, 8), [take], dp=3)
    counts = RowSplit.counts(0, [3 * unit, 7 * unit, 0, 5 * unit, unit, 0, 6 * unit, rows - 22 * unit])
    lanes = RowSplit.counts(0, [9 * unit, 0, 11 * unit, rows - 20 * unit])
    runs = layout(range(8), [counts], dp=8), layout(range(8), [lanes, Shard(0)], dp=4, tp=2)
    return shuffled, runs
