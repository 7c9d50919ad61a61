"""Plans and bounds by example; random ones are in test_transfer_properties.py."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh.errors import LayoutError
from hetmesh.layout import Layout, MeshSpec, RowSplit, missing_elements
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
