"""How even batches are: against sums sample by sample, of any plan."""

import numpy as np
import pytest

from hetmesh.balance import BatchPlan, assign, batch_loads, batch_plan_of, graph_slots
from hetmesh.balance.imbalance import batch_load, plan_assignment
from hetmesh.balance.plan_batch import BalanceOptions
from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

GRAPH = ModuleGraph(
    (
        ModuleSpec("vision", MeshSpec.make(range(3), dp_replicate=3), features=4),
        ModuleSpec("llm", MeshSpec.make(range(2, 4), dp_replicate=2)),
    ),
    (BoundarySpec("vision", "llm", "image"),),
)


def samples(count, seed=0):
    rows = np.random.default_rng(seed).integers(0, 30, count).tolist()
    return [SampleMeta(f"s{i}", 5 + n, targets=((4, 5),), rows={"vision": n}) for i, n in enumerate(rows)]


@pytest.mark.parametrize("policy", ["none", "two_dim", "entrain"])
def test_a_plan_is_the_assignment_that_it_was_made_from(policy):
    some = samples(41)
    options = BalanceOptions(policy, deferral=True)
    found = assign(batch_loads(GRAPH, some), graph_slots(GRAPH, 5, options), policy)
    back = plan_assignment(batch_plan_of(GRAPH, some, found))
    assert (back.lanes, back.microbatches) == (found.lanes, found.microbatches)
    assert (back.microbatch == found.microbatch).all()
    assert (back.lane == found.lane).all()
    assert (back.deferred == found.deferred).all()
    assert found.deferred.any() == (policy == "entrain")


def test_loads_padding_and_deferral_of_a_plan_equal_sums_by_hand():
    some = samples(9)
    vision = (((0, 1), (2,), ()), ((3, 4, 5), (6,), (7, 8)))
    llm = (((0, 1), (2,)), ((3,), (4,)), ((5,), (6, 7)), ((), (8,)))  # of four microbatches, two per one of vision's
    plan = BatchPlan(GRAPH, tuple(some), {"vision": vision, "llm": llm})
    found = batch_load(batch_loads(GRAPH, some), plan_assignment(plan), padded=True)
    for name, lanes, size in (
        ("vision", vision, lambda s: s.rows["vision"]),
        ("llm", llm, lambda s: s.tokens),
    ):
        parts = [part for microbatch in lanes for part in microbatch]
        sums = [sum(size(some[i]) for i in part) for part in parts]
        held = [total for total, part in zip(sums, parts, strict=True) if part]
        assert found.modules[name].max_over_mean == pytest.approx(max(sums) / np.mean(sums))
        assert found.modules[name].std_over_mean == pytest.approx(np.std(held) / np.mean(sums))
    computed = sum(len(part) * max(some[i].tokens for i in part) for lanes in llm for part in lanes if part)
    assert found.modules["llm"].padding == pytest.approx(1 - plan.num_tokens / computed)
    assert found.modules["vision"].padding == 0.0
    assert found.deferred == 0
    late = BatchPlan(GRAPH, tuple(some), {"vision": vision, "llm": (llm[2], llm[3], llm[0], llm[1])})
    assert plan_assignment(late).deferred.tolist() == [True] * 3 + [False] * 6


def test_empty_batches_are_even():
    plan = BatchPlan(GRAPH, (), {"vision": (((), (), ()),), "llm": (((), ()),)})
    found = batch_load(batch_loads(GRAPH, ()), plan_assignment(plan), padded=True)
    assert found.modules["llm"].max_over_mean == 1.0
    assert (found.modules["llm"].std_over_mean, found.modules["llm"].padding, found.deferred) == (0.0, 0.0, 0)
