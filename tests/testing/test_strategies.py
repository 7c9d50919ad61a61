"""The strategies reach every corner that they promise, and draw nothing illegal."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial

from hetmesh._torch_compat import StridedShard
from hetmesh.layout import RowSplit, plan_transfer
from hetmesh.layout.intervals import extent
from hetmesh.testing import strategies

PAIRS = strategies.layout_pairs(8)


def _ranks(pair):
    return set(pair.src.mesh.ranks), set(pair.dst.mesh.ranks)


def _has(layout, kind):
    return any(isinstance(p, kind) for p in layout.placements)


def _rows(layout):
    return [rows for p in layout.placements if isinstance(p, RowSplit) for rows in p.intervals]


def _stacked(layout):
    dims = [p.dim for p in layout.placements if hasattr(p, "dim")]
    return len(set(dims)) < len(dims)


CORNERS = {
    "identical": lambda p: p.src.mesh == p.dst.mesh and p.src.mesh.size > 1,
    "permuted": lambda p: _ranks(p)[0] == _ranks(p)[1] and p.src.mesh.ranks != p.dst.mesh.ranks,
    "disjoint": lambda p: not _ranks(p)[0] & _ranks(p)[1],
    "overlapping": lambda p: all(
        (_ranks(p)[0] & _ranks(p)[1], _ranks(p)[0] - _ranks(p)[1], _ranks(p)[1] - _ranks(p)[0])
    ),
    "3 ranks to 2": lambda p: (p.src.mesh.size, p.dst.mesh.size) == (3, 2),
    "gaps": lambda p: max(p.src.mesh.ranks) - min(p.src.mesh.ranks) >= p.src.mesh.size,
    "not ascending": lambda p: any(a > b for a, b in pairwise(p.src.mesh.ranks)),
    "three axes": lambda p: p.src.mesh.ndim == 3,
    "an axis of size 1": lambda p: p.src.mesh.size > 1 and 1 in p.src.mesh.sizes,
    "a dim of size 0": lambda p: 0 in p.shape,
    "an empty shard": lambda p: 0 not in p.shape and any(0 in p.src.local_shape(p.shape, r) for r in p.src.mesh.ranks),
    "uneven shards": lambda p: len({p.dst.local_shape(p.shape, r) for r in p.dst.mesh.ranks}) > 1,
    "stacked shards": lambda p: _stacked(p.src),
    "a strided source": lambda p: _has(p.src, StridedShard),
    "a strided destination": lambda p: _has(p.dst, StridedShard),
    "a partial source": lambda p: _has(p.src, Partial),
    "a partial destination": lambda p: _has(p.dst, Partial),
    "an empty coordinate": lambda p: () in _rows(p.src) and any(_rows(p.src)),
    "rows out of order": lambda p: any(a > b for rows in _rows(p.src) for a, b in pairwise(rows)),
    "rows that several keep": lambda p: any(_overlap(q) for q in p.dst.placements if isinstance(q, RowSplit)),
    "rows split further": lambda p: _has(p.src, RowSplit) and _stacked(p.src),
    "a source without some rows": lambda p: any(
        isinstance(q, RowSplit) and sum(map(extent, q.intervals)) < p.shape[q.dim] for q in p.src.placements
    ),
}


def _overlap(split):
    intervals = sorted(interval for rows in split.intervals for interval in rows)
    return any(b > c for (_, b), (c, _) in pairwise(intervals))


@pytest.mark.slow
@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS)
def test_every_corner_is_reached(corner):
    options = settings(max_examples=1000, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    find(PAIRS, corner, settings=options)


@settings(max_examples=100)
@given(PAIRS)
def test_pairs_can_be_planned(pair):
    plan_transfer(pair.shape, pair.src, pair.dst)


@settings(max_examples=100)
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), strategies.mesh_specs(n, max_axes=2))))
def test_meshes_stay_within_their_world(case):
    world, mesh = case
    assert set(mesh.ranks) <= set(range(world))
    assert mesh.ndim <= 2


def test_given_ranks_are_kept_in_order():
    assert find(strategies.mesh_specs([5, 2, 7, 4]), lambda mesh: mesh.sizes == (2, 2)).ranks == (5, 2, 7, 4)


@settings(max_examples=50)
@given(
    strategies.layout_pairs(4, partial_source=False, partial_destination=False, rows=False, strided=False),
    strategies.layout_pairs(1),
)
def test_options(plain, alone):
    for layout in (plain.src, plain.dst):
        assert not any(_has(layout, kind) for kind in (Partial, RowSplit, StridedShard))
    assert alone.src.mesh.ranks == alone.dst.mesh.ranks == (0,)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.tuples(st.integers(0, 9), st.integers(1, 4)).flatmap(
        lambda c: st.tuples(st.just(c), strategies.row_splits(0, *c))
    )
)
def test_exact_row_splits_hold_every_row_once(case):
    (length, coordinates), split = case
    assert len(split.intervals) == coordinates
    assert sorted(r for rows in split.intervals for a, b in rows for r in range(a, b)) == list(range(length))
