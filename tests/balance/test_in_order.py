"""BatchPlan and the in_order policy: every sample once in every module, lanes that need not divide the batch."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetmesh.balance import BatchPlan, boundary_layouts
from hetmesh.balance.in_order import in_order
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec, plan_transfer

EDGE = BoundarySpec("vision", "llm", "image")


def graph(encoder_lanes, llm_lanes):
    vision = ModuleSpec("vision", MeshSpec.make(range(encoder_lanes), dp_replicate=encoder_lanes), features=4)
    llm = ModuleSpec("llm", MeshSpec.make(range(2 * llm_lanes), dp_replicate=llm_lanes, tp=2))
    return ModuleGraph((vision, llm), (EDGE,))


def metas(rows):
    return [SampleMeta(f"s{i}", 5 + n, targets=((4, 5),), rows={"vision": n}) for i, n in enumerate(rows)]


@given(
    rows=st.lists(st.integers(0, 4), max_size=20),
    encoder_lanes=st.integers(1, 5),
    llm_lanes=st.integers(1, 4),
    size=st.integers(1, 4),
)
def test_every_sample_is_handled_once_by_every_module(rows, encoder_lanes, llm_lanes, size):
    plan = in_order(graph(encoder_lanes, llm_lanes), metas(rows), size)
    for name, lanes in (("vision", encoder_lanes), ("llm", llm_lanes)):
        handled = [
            i for m in range(plan.num_microbatches) for lane in range(lanes) for i in plan.samples_of(name, m, lane)
        ]
        assert handled == list(range(len(rows)))
        counts = [len(plan.samples_of(name, 0, lane)) for lane in range(lanes)]
        assert max(counts) - min(counts) <= 1
    assert plan.num_targets == len(rows)
    assert plan.num_tokens == sum(5 + n for n in rows)
    for m in range(plan.num_microbatches):
        shape, src, dst = boundary_layouts(plan, EDGE, m)
        assert shape == (sum(rows[i] for lane in plan.lanes["llm"][m] for i in lane), 4)
        plan_transfer(shape, src, dst)  # every row that the LLM keeps has a source


def test_the_worked_example():
    plan = in_order(graph(3, 2), metas([2, 0, 1, 3]), 2)
    shape, src, dst = boundary_layouts(plan, EDGE, 0)
    assert shape == (6, 4)
    assert [src.local_shape(shape, rank)[0] for rank in range(3)] == [2, 1, 3]  # samples 0-1, 2, 3
    assert [dst.local_shape(shape, rank)[0] for rank in range(4)] == [2, 2, 4, 4]  # samples 0-1 and 2-3, each on tp 2


def test_samples_lost_or_repeated_are_named():
    g = graph(1, 1)
    with pytest.raises(GraphError, match=r"module 'vision' must handle every sample once; wrong are \[1\]"):
        BatchPlan(g, tuple(metas([1, 1])), {"vision": (((0,),),), "llm": (((0, 1),),)})
    with pytest.raises(GraphError, match="module 'vision' needs microbatches of 1 lanes"):
        BatchPlan(g, tuple(metas([1, 1])), {"vision": (((0,), (1,)),), "llm": (((0, 1),),)})


def test_a_sample_without_row_counts_is_named():
    plan = in_order(graph(1, 1), [SampleMeta("lonely", 3)], 1)
    with pytest.raises(GraphError, match="'lonely' has no row count for module 'vision'"):
        boundary_layouts(plan, EDGE, 0)
