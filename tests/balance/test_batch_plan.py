"""BatchPlan and the policy `none`: every sample once in every module, lanes that need not divide the batch."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hetmesh.balance import (
    POLICIES,
    BalanceOptions,
    BatchPlan,
    batch_loads,
    boundary_layouts,
    graph_slots,
    plan_batch,
)
from hetmesh.balance.plan_batch import within_range
from hetmesh.cost.flops import SampleCosts
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec, plan_transfer

EDGE = BoundarySpec("vision", "llm", "image")


def graph(encoder_lanes, llm_lanes):
    vision = ModuleSpec("vision", MeshSpec.make(range(encoder_lanes), dp_replicate=encoder_lanes), features=4)
    llm = ModuleSpec("llm", MeshSpec.make(range(2 * llm_lanes), dp_replicate=llm_lanes, tp=2))
    return ModuleGraph((vision, llm), (EDGE,))


def metas(rows):
    return [SampleMeta(f"s{i}", 5 + n, targets=((4, 5),), rows={"vision": n}) for i, n in enumerate(rows)]


@pytest.mark.slow
@given(
    rows=st.lists(st.integers(0, 4), max_size=20),
    encoder_lanes=st.integers(1, 5),
    llm_lanes=st.integers(1, 4),
    size=st.integers(1, 4),
)
def test_every_sample_is_handled_once_by_every_module(rows, encoder_lanes, llm_lanes, size):
    plan = plan_batch(graph(encoder_lanes, llm_lanes), metas(rows), size)
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
    plan = plan_batch(graph(3, 2), metas([2, 0, 1, 3]), 2)
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
    plan = plan_batch(graph(1, 1), [SampleMeta("lonely", 3)], 1)
    with pytest.raises(GraphError, match="'lonely' has no row count for module 'vision'"):
        boundary_layouts(plan, EDGE, 0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_makes_a_plan_of_the_same_microbatches(policy):
    """A projector on the LLM's ranks goes where its rows are wanted, encoder lanes where the loads are even."""
    rng = np.random.default_rng(0)
    llm = ModuleSpec("llm", MeshSpec.make(range(4), dp_replicate=2, tp=2), packed=True)
    projector = ModuleSpec("projector", llm.mesh, features=4)
    vision = ModuleSpec("vision", MeshSpec.make(range(4), dp_replicate=4), features=4, media="image")
    modules = ModuleGraph(
        (vision, projector, llm), (BoundarySpec("vision", "projector", None), BoundarySpec("projector", "llm", "image"))
    )
    samples = [
        SampleMeta(
            f"s{i}",
            int(rows) + 9,
            (MediaItem("image", (3, 8, 8), 1, int(rows)),),
            ((4, 5),),
            rows={"vision": int(rows), "projector": int(rows)},
        )
        for i, rows in enumerate(rng.integers(1, 60, 32))
    ]
    plan = plan_batch(modules, samples, 4, BalanceOptions(policy))
    assert plan.num_microbatches == 4
    assert plan.lanes["projector"] == plan.lanes["llm"]
    loads = batch_loads(modules, samples)
    assert loads.modules == ("vision", "llm")
    rows = sum(sample.rows["vision"] for sample in samples)
    assert loads.work.sum(0).tolist() == [rows, sum(-(-s.tokens // 2) - (-s.rows["projector"] // 2) for s in samples)]
    if policy in ("two_dim", "auto"):
        rows = [[sum(samples[i].rows["vision"] for i in lane) for lane in lanes] for lanes in plan.lanes["vision"]]
        assert max(map(max, rows)) < 1.3 * np.mean(rows)
        for m in range(4):  # vision's lanes 0 and 1 are the ranks of lane 0 of the LLM
            for lane in (0, 1):
                made = {i for part in plan.lanes["vision"][m][2 * lane : 2 * lane + 2] for i in part}
                assert made == set(plan.samples_of("llm", m, lane)) == set(plan.samples_of("projector", m, lane))
                own = plan.samples_of("llm", m, lane)
                assert own == tuple(sorted(own, key=lambda i: (i not in plan.samples_of("vision", m, 2 * lane), i)))


def test_what_a_recipe_asks_for_reaches_the_balancer():
    slots = graph_slots(graph(2, 2), 4, BalanceOptions("auto", {}, {"llm": 99}, free=True, deferral=True))
    assert slots.max_tokens == (None, 99)
    assert slots.free
    assert slots.deferral
    assert slots.affinity[0].tolist() == [[1, 0], [1, 0]]
    costs = {"vision": SampleCosts((3, 1, 0), 1.5), "llm": SampleCosts((8, 1, 5), 2.0)}
    slots = graph_slots(graph(2, 2), 4, BalanceOptions("auto", costs))
    assert slots.overhead == (256 * 3, 256 * 8 // 2)  # as much as 256 rows; two ranks share those of the LLM
    assert slots.backward == (1.5, 2.0)
    still = graph(2, 2)
    still = ModuleGraph((replace(still["vision"], trainable=False), still["llm"]), (EDGE,))
    assert graph_slots(still, 4).backward == (0.0, 2.0)
    with pytest.raises(GraphError, match=r"max_tokens names \['audio'\]; the modules that are balanced are \['vis"):
        graph_slots(graph(2, 2), 4, BalanceOptions(max_tokens={"audio": 99}))
    with pytest.raises(GraphError, match=r"sample 's1' has 8 tokens for module 'llm'; max_tokens .* is 7"):
        plan_batch(graph(1, 1), metas([1, 3]), 1, BalanceOptions("two_dim", max_tokens={"llm": 7}))


def test_what_goes_along_with_an_encoder_takes_its_lanes():
    """Not those of the LLM: it has others."""
    four, two = MeshSpec.make(range(4), dp_replicate=4), MeshSpec.make([4, 5], dp_replicate=2)
    modules = (ModuleSpec("vision", four, features=4, media="image"), ModuleSpec("projector", four, features=4))
    edges = BoundarySpec("vision", "projector", None), BoundarySpec("projector", "llm", "image")
    plan = plan_batch(ModuleGraph((*modules, ModuleSpec("llm", two)), edges), metas([1, 2, 3, 4, 5, 6, 7, 8]), 2)
    assert plan.lanes["projector"] == plan.lanes["vision"]
    assert len(plan.lanes["projector"][0]) == 4


def test_samples_of_a_million_tokens_are_balanced_as_short_ones_are():
    """Their FLOPs do not fit into 64 bits."""
    llm = ModuleSpec("llm", MeshSpec.make([0, 1], dp_replicate=2), packed=True)
    only = ModuleGraph((llm,), ())
    lengths = [1_000_000 * n for n in (16, 9, 7, 6, 5, 5, 4, 3)]
    options = BalanceOptions("two_dim", {"llm": SampleCosts((16 * 10**9, 600_000, 10**9), 2.0)})
    samples = [SampleMeta(f"s{i}", n, targets=((1, n),)) for i, n in enumerate(lengths)]
    plan = plan_batch(only, samples, 4, options)
    work = [sum(samples[i].tokens ** 2 for i in plan.samples_of("llm", 0, lane)) for lane in range(2)]
    assert max(work) / sum(work) < 0.54  # the largest alone is 0.52
    loads = batch_loads(only, samples, within_range(only, samples, options))
    assert (loads.work > 0).all()
    assert loads.work.sum(0)[0] > 0
    assert within_range(only, samples[:0], options) is options
