"""The executor: what scatter, gather, draw and inner mean, and that it refuses plans that make no sense."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh.layout import Layout, MeshSpec, RowSplit, plan_transfer
from hetmesh.testing import executor, strategies

TWO = MeshSpec.make(range(2), a=2)
GRID = MeshSpec.make([3, 1, 0, 2], a=2, b=2)
cases = strategies.shapes().flatmap(lambda shape: st.tuples(st.just(shape), strategies.layouts(shape)))


def _tags(shape):
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)


@settings(max_examples=100)
@given(cases)
def test_gather_undoes_scatter(case):
    shape, layout = case
    local = executor.scatter(_tags(shape), layout)
    assert {rank: tuple(t.shape) for rank, t in local.items()} == {r: layout.local_shape(shape, r) for r in local}
    assert torch.equal(executor.gather(local, layout, shape), _tags(shape))


@settings(max_examples=100)
@given(cases)
def test_gather_is_the_adjoint_of_scatter(case):
    shape, layout = case
    y = executor.draw(layout.gradient(), shape)
    x = _tags(shape).double()
    left = executor.inner(executor.scatter(x, layout.gradient()), y, layout.gradient())
    assert left == float((x * executor.gather(y, layout.gradient(), shape)).sum())


def test_scatter_by_hand():
    local = executor.scatter(torch.arange(6), Layout(GRID, [Shard(0), Replicate()]))
    assert {rank: t.tolist() for rank, t in local.items()} == {3: [0, 1, 2], 1: [0, 1, 2], 0: [3, 4, 5], 2: [3, 4, 5]}
    local = executor.scatter(torch.tensor([7, 8]), Layout(TWO, [Partial()]))
    assert (local[0] + local[1]).tolist() == [7, 8]
    assert local[0].all()
    assert local[1].all()


def test_draw_is_equal_on_replicas_only():
    drawn = executor.draw(Layout(GRID, [Partial(), Replicate()]), (4,))
    assert torch.equal(drawn[3], drawn[1])
    assert not torch.equal(drawn[3], drawn[0])
    # Both coordinates hold row 0, each as a consumer of its own.
    drawn = executor.draw(Layout(TWO, [RowSplit(0, (((0, 1),), ((0, 1),)))]), (1,))
    assert not torch.equal(drawn[0], drawn[1])


def test_inner_counts_replicas_once_and_summands_all():
    ones = {rank: torch.ones(4) for rank in GRID.ranks}
    assert executor.inner(ones, ones, Layout(GRID, [Replicate(), Replicate()])) == 4
    assert executor.inner(ones, ones, Layout(GRID, [Partial(), Replicate()])) == 8


def test_execute_by_hand():
    src, dst = Layout(TWO, [Shard(0)]), Layout(MeshSpec.make([5], a=1), [RowSplit(0, (((2, 4), (0, 1)),))])
    got = executor.execute(plan_transfer((4,), src, dst).steps, {0: torch.tensor([1, 2]), 1: torch.tensor([3, 4])})
    assert {rank: t.tolist() for rank, t in got.items()} == {5: [3, 4, 1]}


def _step(**changes):
    step = plan_transfer((4,), Layout(TWO, [Shard(0)]), Layout(TWO, [Replicate()])).steps[0]
    names = ("shape", "src", "dst", "summed", "pieces")
    return SimpleNamespace(**{name: getattr(step, name) for name in names} | changes)


def test_execute_refuses_plans_that_make_no_sense():
    tensors = {0: torch.tensor([1, 2]), 1: torch.tensor([3, 4])}
    pieces = _step().pieces
    with pytest.raises(AssertionError, match="does not hold all of it"):
        executor.execute([_step(pieces=(replace(pieces[0], src=1 - pieces[0].src),))], tensors)
    with pytest.raises(AssertionError, match="does not keep all of it"):
        executor.execute([_step(dst=Layout(TWO, [Shard(0)]))], tensors)
    with pytest.raises(AssertionError, match="gets an element 2 times"):
        executor.execute([_step(pieces=(*pieces, pieces[0]))], tensors)
    with pytest.raises(AssertionError, match=r"rank 1 holds \(3,\), not \(2,\)"):
        executor.execute([_step()], {**tensors, 1: torch.zeros(3)})
