"""Which modules go along with another one, which lanes share ranks, and which lane takes which whole microbatches."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetmesh.balance import POLICIES, BalanceOptions, plan_batch
from hetmesh.balance.co_located import deal_microbatches, lane_affinity, leaders, pipelines
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

DP = MeshSpec.make(range(4), dp_replicate=4)
DP_TP = MeshSpec.make(range(4), dp_replicate=2, tp=2)
OTHERS = MeshSpec.make([4, 5], dp_replicate=2)


def graph(**encoder):
    """An LLM of two stages and two lanes on eight ranks, and an encoder on them."""
    llm = ModuleSpec("llm", MeshSpec.make(range(8), pp=2, dp_replicate=2, tp=2), packed=True)
    vision = ModuleSpec("vision", MeshSpec.make(range(8), **encoder), features=4, media="image")
    return ModuleGraph((vision, llm), (BoundarySpec("vision", "llm", "image"),))


def samples(count):
    some = [SampleMeta(f"s{i}", 9 + i, (MediaItem("image", (3, 8, 8), 1, 2 + i % 5),), ((4, 5),)) for i in range(count)]
    return [replace(sample, rows={"vision": sample.media[0].rows}) for sample in some]


def test_the_worked_case():
    assert deal_microbatches(8, (5, 3)) == ((0, 1, 0, 0, 1, 0, 1, 0), (0, 0, 1, 2, 2, 3, 3, 4))
    assert deal_microbatches(4, (1, 1)) == ((0, 1, 0, 1), (0, 0, 1, 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple), st.data())
def test_every_pipeline_has_its_share_at_any_time(shares, data):
    exact = data.draw(st.booleans())
    count = sum(shares) if exact else data.draw(st.integers(1, 40))
    taken, numbers = deal_microbatches(count, shares)
    assert len(taken) == len(numbers) == count
    totals = [taken.count(j) for j in range(len(shares))]
    assert not exact or tuple(totals) == shares
    for j, share in enumerate(shares):
        assert abs(totals[j] - count * share / sum(shares)) < 1
        for i in range(count):
            assert abs(taken[: i + 1].count(j) - totals[j] * (i + 1) / count) < len(shares)
    assert list(numbers) == sorted(numbers)
    assert set(numbers) == set(range(numbers[-1] + 1))
    assert len({*zip(taken, numbers, strict=True)}) == count  # a pipeline has one microbatch at a time


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_lane_takes_whole_microbatches_of_the_llm_s_lane_on_whose_ranks_it_lies(policy):
    g, some = graph(dp_replicate=4, tp=2), samples(32)
    plan = plan_batch(g, some, 2, BalanceOptions(policy, microbatch_shares={"vision": (5, 3)}))
    assert pipelines(g, "vision") == ((0, 2), (1, 3))  # ranks 0-1 and 4-5 are the first lane of the LLM
    taken, numbers = deal_microbatches(8, (5, 3))
    for lane, own in enumerate(pipelines(g, "vision")):
        for m in range(8):
            made = set(plan.samples_of("vision", numbers[m], own[taken[m]]))
            assert made == set(plan.samples_of("llm", m, lane))
        assert [sum(bool(lanes[each]) for lanes in plan.lanes["vision"]) for each in own] == [5, 3]
    assert len(plan.lanes["vision"]) == 5


def test_what_cannot_be_shared_out_is_an_error():
    def refused(given, shares):
        with pytest.raises(GraphError) as caught:
            plan_batch(given, samples(16), 2, BalanceOptions("auto", microbatch_shares=shares))
        return str(caught.value)

    assert "3 shares, but 2 lanes of 'vision' lie on" in refused(graph(dp_replicate=4, tp=2), {"vision": (1, 2, 1)})
    assert "each must be at least 1" in refused(graph(dp_replicate=4, tp=2), {"vision": (4, 0)})
    assert "'vision' has 1 lanes and 'llm' has 2" in refused(graph(tp=8), {"vision": (1,)})
    assert "microbatch_shares names ['llm']" in refused(graph(dp_replicate=4, tp=2), {"llm": (1, 1)})
    apart = graph(dp_replicate=4, tp=2)
    apart = replace(
        apart, modules=(replace(apart["vision"], mesh=MeshSpec.make(range(8, 12), dp_replicate=4)), apart["llm"])
    )
    assert "which lie on its ranks and on no other's" in refused(apart, {"vision": (1, 1)})
    capped = BalanceOptions("auto", max_tokens={"vision": 9}, microbatch_shares={"vision": (5, 3)})
    with pytest.raises(GraphError, match="'vision' would take"):
        plan_batch(graph(dp_replicate=4, tp=2), samples(32), 4, capped)


@pytest.mark.parametrize(
    ("vision", "projector", "led"),
    [
        (DP, DP_TP, {"vision": "vision", "projector": "llm", "llm": "llm"}),
        (DP, DP, {"vision": "vision", "projector": "vision", "llm": "llm"}),
        (DP_TP, DP_TP, {"vision": "llm", "projector": "llm", "llm": "llm"}),
        (DP, OTHERS, {"vision": "vision", "projector": "projector", "llm": "llm"}),
    ],
)
def test_modules_of_one_mesh_go_together(vision, projector, led):
    graph = ModuleGraph(
        (
            ModuleSpec("vision", vision, features=4, media="image"),
            ModuleSpec("projector", projector, features=4),
            ModuleSpec("llm", DP_TP),
        ),
        (BoundarySpec("vision", "projector", None), BoundarySpec("projector", "llm", "image")),
    )
    assert leaders(graph) == led


def test_lanes_that_share_ranks():
    permuted = MeshSpec.make([3, 0, 2, 1], dp_replicate=4)
    llm = ModuleSpec("llm", DP_TP)  # lanes of ranks 0-1 and 2-3
    assert lane_affinity(ModuleSpec("vision", DP), llm).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert lane_affinity(ModuleSpec("vision", permuted), llm).tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert lane_affinity(ModuleSpec("vision", OTHERS), llm) is None


def test_what_one_of_several_consumers_shares_with_its_producer():
    graph = ModuleGraph(
        (
            ModuleSpec("vision", DP, features=4, media="image"),
            ModuleSpec("projector", DP, features=4),
            ModuleSpec("llm", DP_TP),
        ),
        (
            BoundarySpec("vision", "projector", None),
            BoundarySpec("vision", "llm", "thumbnail"),
            BoundarySpec("projector", "llm", "image"),
        ),
    )
    assert leaders(graph) == {"vision": "vision", "projector": "vision", "llm": "llm"}
