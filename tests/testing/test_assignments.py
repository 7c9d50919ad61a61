"""The assignments that tests try: every sample once in every module, alike on every rank, and routes of all kinds."""

from hetmesh.graph import BoundarySpec, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec
from support.assignments import Deferred, RandomAssignment

GRAPH = ModuleGraph(
    (
        ModuleSpec("vision", MeshSpec.make(range(2), dp_replicate=2), features=4),
        ModuleSpec("llm", MeshSpec.make(range(3), dp_replicate=3)),
    ),
    (BoundarySpec("vision", "llm", "image"),),
)
SAMPLES = [SampleMeta(f"s{i}", 5, rows={"vision": i % 3}) for i in range(6)]


def test_random_assignments_differ_by_seed_and_batch_and_not_by_rank():
    plans = [RandomAssignment(seed)(GRAPH, SAMPLES[i:], 1) for seed in range(20) for i in range(2)]
    again = [RandomAssignment(seed)(GRAPH, SAMPLES[i:], 1) for seed in range(20) for i in range(2)]
    assert [plan.lanes for plan in plans] == [plan.lanes for plan in again]  # a BatchPlan has checked every sample
    assert len({plan.routes for plan in plans}) > 30
    assert any(plan.routes.count("vision") != plan.routes.count("llm") for plan in plans)


def test_deferral_goes_to_the_same_and_the_next_microbatch():
    whole, split = Deferred(2)(GRAPH, SAMPLES, 1), Deferred(2, split=True)(GRAPH, SAMPLES, 1)
    assert [sorted(i for lane in m for i in lane) for m in whole.lanes["llm"]] == [[0], [1, 2], [3, 4, 5]]
    # samples 0 and 3 have no rows
    assert dict(whole.routes.pairs) == {("vision", "llm"): ((0, 1), (1, 1), (2, 2))}
    assert dict(split.routes.pairs) == {("vision", "llm"): ((1, 1), (2, 1), (4, 2))}
    assert split.routes.count("vision") == 6
