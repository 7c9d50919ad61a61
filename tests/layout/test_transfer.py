"""Plans and bounds by example; random ones are in test_transfer_properties.py."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh.errors import LayoutError
from hetmesh.layout import Layout, MeshSpec, RowSplit, missing_elements, plan_transfer
from hetmesh.testing.bounds import minimal_elements


def test_the_bound_is_that_of_the_brute_force():
    split = RowSplit(0, (((0, 3), (8, 11)), ((3, 8),)))
    source = Layout(MeshSpec.make(range(4), lane=2, tp=2), (split, Replicate()))
    for destination in (
        Layout(MeshSpec.make([1, 4], lane=2), (Shard(0),)),
        Layout(MeshSpec.make([3, 0, 2], tp=3), (Shard(1),)),
        Layout(MeshSpec.make([2, 5], lane=2), (Replicate(),)),
    ):
        for src, dst in ((source, destination), (destination, source)):
            assert missing_elements((11, 7), src, dst) == sum(minimal_elements((11, 7), src, dst).values())


def test_summands_are_not_counted():
    one = MeshSpec.make([0, 1], tp=2)
    with pytest.raises(LayoutError, match="summands"):
        missing_elements((4, 2), Layout(one, (Partial(),)), Layout(one, (Replicate(),)))


MESH = MeshSpec.make([0, 1], dp=2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MeshSpec.make([0, 0.5], dp=2), "the ranks of a mesh must be whole numbers"),
        (lambda: MeshSpec.make(4, dp=4), "the ranks of a mesh must be whole numbers, got 4"),
        (lambda: MeshSpec((0, 1), ("dp",), (2.5,)), "the sizes of mesh axes must be whole numbers"),
        (lambda: MeshSpec((0, 1), (3,), (2,)), "names of mesh axes must be strings"),
        (lambda: MeshSpec((0, 1), 3, (2,)), "a mesh needs a sequence of axis names, got 3"),
        (lambda: Layout(MESH, (Shard(0),)).cells(4), "the sizes of a shape must be whole numbers, got 4"),
        (lambda: Layout(MESH, (Shard(0),)).canonical(None), "the sizes of a shape must be whole numbers, got None"),
        (lambda: plan_transfer((4,), MESH, Layout(MESH, (Shard(0),))), r"src must be a hetmesh.Layout, got MeshSpec"),
        (lambda: plan_transfer((4,), Layout(MESH, (Shard(0),)), "S(0)"), r"dst must be a hetmesh.Layout, got 'S\(0\)'"),
        (lambda: plan_transfer([4.5], *[Layout(MESH, (Shard(0),))] * 2), "sizes of a shape must be whole numbers"),
        (lambda: MeshSpec.make([0, 1], dp="2"), "the sizes of mesh axes must be whole numbers"),
        (lambda: RowSplit(0, (((0, 1.5),), ((2, 4),))), r"pairs \[start, stop\) of whole numbers"),
        (lambda: RowSplit(0, ((0, 1), (2, 4))), r"pairs \[start, stop\) of whole numbers"),
        (lambda: RowSplit(0, 3), r"pairs \[start, stop\) of whole numbers"),
        (lambda: RowSplit(0.5, (((0, 1),),)), "the dim must be whole numbers"),
        (lambda: RowSplit.counts(0, [2.5, 1.5]), "the counts must be whole numbers"),
        (lambda: Layout([0, 1], (Shard(0),)), "must be a MeshSpec"),
        (lambda: Layout(MESH, Shard(0)), "a sequence of placements"),
        (lambda: Layout(MESH, ("rows",)), "is not a placement"),
        (lambda: plan_transfer((-4, 3), Layout(MESH, (Shard(0),)), Layout(MESH, (Replicate(),))), "not be negative"),
        (lambda: plan_transfer((4.5, 3), Layout(MESH, (Shard(0),)), Layout(MESH, (Replicate(),))), "whole numbers"),
        (lambda: Layout(MESH, (Shard(0),)).local_shape((-4, 3), 0), "not be negative"),
    ],
)
def test_numbers_and_types_that_make_no_layout(make, says):
    with pytest.raises(LayoutError, match=says):
        make()


def test_a_shape_may_be_a_list():
    src, dst = Layout(MESH, (Shard(0),)), Layout(MESH, (Replicate(),))
    assert plan_transfer([4, 3], src, dst) is plan_transfer((4, 3), src, dst)
