"""Lanes that act apart: drawn sets of ranks, equal replicas made one, and encoders spread over pipeline stages."""

from dataclasses import replace

import pytest
from graphs import encoder_and_llm, equal_costs, module
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate_properties import cases

from analysis.latest_starts import latest_starts
from analysis.lower_bounds import busiest_rank, critical_path
from hetmesh.balance import plan_batch
from hetmesh.cost import Lanes, ModuleShape, StageCost, load_machine
from hetmesh.graph import ModuleGraph, SampleMeta, Stage
from hetmesh.schedule import POLICIES
from hetmesh.simulate import StepModel, bubbles, simulate
from hetmesh.simulate.lanes import merge_equal_replicas


@st.composite
def lane_cases(draw: st.DrawFn):
    """A schedule, and costs under which the ranks of each module fall into sets of their own."""
    schedule, costs = draw(cases())
    stages = schedule.stages
    size = {s.module: draw(st.sampled_from([1, 2, 4])) for s in stages.stages}
    groups = {}
    for stage in stages.stages:
        ranks, n = stages.ranks_of(stage), size[stage.module]
        n = min(n, len(ranks))
        groups[stage] = tuple(tuple(ranks[i * len(ranks) // n : (i + 1) * len(ranks) // n]) for i in range(n))
    flows = {}
    for edge in stages.edges:
        if not edge.internal:
            sources, destinations = len(groups[edge.source]), len(groups[edge.destination])
            pair = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
            for route in schedule.routes.along(edge):
                if draw(st.booleans()):
                    flows[route] = tuple(sorted(draw(st.sets(pair, max_size=3))))
    each = {}
    for (stage, m), cost in costs.stages.items():
        if draw(st.integers(0, 3)) == 0:
            each[stage, m] = tuple(replace(cost, forward=cost.forward * (i + 1) / 4) for i in range(len(groups[stage])))
    return schedule, replace(costs, lanes=Lanes(groups, flows, each))


@pytest.mark.slow
@settings(max_examples=150)
@given(case=lane_cases())
def test_lanes_keep_every_bound_and_no_slowdown_changes_nothing(case):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    assert timeline.makespan >= critical_path(schedule, costs) - 1e-9
    assert timeline.makespan >= busiest_rank(schedule, costs) - 1e-9
    for held in bubbles(timeline):
        assert held.compute + held.idle == pytest.approx(timeline.makespan, abs=1e-9)
    nearly = simulate(schedule, replace(costs, busy_slowdown=(1.0, 1.0 + 1e-13)))
    assert [(s.name, s.track) for s in nearly.spans()] == [(s.name, s.track) for s in timeline.spans()]
    assert [s.start for s in nearly.spans()] == pytest.approx([s.start for s in timeline.spans()], abs=1e-9)
    first = {}
    for span in timeline.spans():
        first[span.name] = min(span.start, first.get(span.name, span.start))
    latest = latest_starts(schedule, costs, timeline.makespan).tolist()
    for action, late in zip(schedule.actions, latest, strict=True):
        assert late >= first.get(str(action), 0.0) - 1e-9


@pytest.mark.slow
@settings(max_examples=100)
@given(case=lane_cases())
def test_lanes_never_end_later_than_all_together(case):
    schedule, costs = case
    assert costs.lanes is not None
    worst = {key: max(each, key=lambda c: c.forward) for key, each in costs.lanes.costs.items()}
    together = replace(costs, stages={**costs.stages, **worst}, lanes=None)
    apart = replace(costs, transfers={})
    assert simulate(schedule, apart).makespan <= simulate(schedule, replace(together, transfers={})).makespan + 1e-9


def _two_lanes(slow: dict[tuple[Stage, int], float]) -> tuple:
    """An LLM of two stages and two lanes; what differs of the second lane's forwards."""
    llm = module("llm", [0, 1, 2, 3], 2)
    stages = encoder_and_llm(module("vision", [4, 5], 1), llm)
    schedule = POLICIES["1f1b"](stages, 4)
    costs = equal_costs(stages, 4, StageCost(1.0, 1.0, 1.0))
    lanes = {s: tuple((r,) for r in stages.ranks_of(s)) for s in stages.stages}
    flows = {r: ((0, 0), (1, 1)) for e in stages.edges[:1] for r in schedule.routes.along(e)}
    each = {(s, m): (StageCost(1.0, 1.0, 1.0), StageCost(seconds, 1.0, 1.0)) for (s, m), seconds in slow.items()}
    return schedule, costs, lanes, flows, each


def test_equal_replicas_are_one_and_others_are_simulated_apart():
    schedule, costs, lanes, flows, each = _two_lanes({})
    assert merge_equal_replicas(lanes, flows, each) is None
    slow = {(Stage("llm", 0), 1): 3.0, (Stage("llm", 1), 2): 5.0}
    schedule, costs, lanes, flows, each = _two_lanes(slow)
    both = simulate(schedule, replace(costs, lanes=merge_equal_replicas(lanes, flows, each)))
    plain = simulate(schedule, costs)
    alone = simulate(
        schedule, replace(costs, stages={**costs.stages, **{k: StageCost(s, 1.0, 1.0) for k, s in slow.items()}})
    )
    assert both.makespan == alone.makespan > plain.makespan
    starts = {(s.name, s.track): s.start for s in both.spans()}
    for one, ranks in ((plain, (0, 2, 4)), (alone, (1, 3, 5))):
        for s in one.spans():
            if s.kind != "REDUCE":
                rank = next(r for r in one.tracks[s.track] if r in ranks)
                assert starts[s.name, both.track_of(rank)] == s.start


def test_lanes_spread_over_pipeline_stages_start_when_their_own_ranks_are_free():
    encoder, llm = module("vision", [0, 1], 1), module("llm", [0, 1], 2)
    stages = encoder_and_llm(encoder, llm)
    schedule = POLICIES["1f1b"](stages, 1)
    costs = equal_costs(stages, 1, StageCost(1.0, 1.0, 1.0))
    vision = Stage("vision")
    groups = {s: tuple((r,) for r in stages.ranks_of(s)) for s in stages.stages}
    apart = replace(costs, lanes=Lanes(groups, {}, {(vision, 0): (StageCost(1.0, 2.0), StageCost(3.0, 1.0))}))
    timeline = simulate(schedule, apart)
    found = {(s.name, timeline.tracks[s.track]): (s.start, s.stop) for s in timeline.spans()}
    assert found["vision.0 F0", (0,)] == (0.0, 1.0)
    assert found["vision.0 F0", (1,)] == (0.0, 3.0)
    assert found["llm.0 F0", (0,)] == (3.0, 4.0)  # rows of both lanes
    backwards = [found["vision.0 B0", (rank,)] for rank in (0, 1)]
    assert backwards == [(9.0, 11.0), (9.0, 10.0)]  # gradients of both come from the first stage
    one_lane = Lanes(groups, dict.fromkeys(schedule.routes.along(stages.edges[0]), ((0, 0),)), apart.lanes.costs)
    timeline = simulate(schedule, replace(costs, lanes=one_lane))
    found = {(s.name, timeline.tracks[s.track]): s.start for s in timeline.spans()}
    assert found["llm.0 F0", (0,)] == 1.0  # the second lane has no rows in it
    assert found["llm.1 F0", (1,)] == 3.0  # whose ranks are not free earlier


@pytest.mark.parametrize("shards", [1, 2])
def test_a_plan_of_uneven_lanes_is_simulated_lane_by_lane(shards):
    """Four lanes of one rank, of which one gets a long sample: alone it takes longer, FSDP makes its neighbour wait."""
    from hetmesh.layout import MeshSpec

    mesh = MeshSpec.make(range(4), dp_replicate=4 // shards, **({"dp_shard": shards} if shards > 1 else {}))
    shape = ModuleShape("llm", (_layer(),))
    graph = ModuleGraph((replace(module("llm", [0, 1, 2, 3], 1), mesh=mesh, splits=(), packed=True),))
    samples = [SampleMeta(f"s{i}", 4096 if i == 2 else 256, targets=((1, 100),)) for i in range(4)]
    plan = plan_batch(graph, samples, 1)
    model = StepModel(graph, {"llm": shape}, replace(load_machine("h100"), peak_flops={"float32": 1e12}))
    schedule = POLICIES["sequential"](model.stages, plan.routes)
    timeline = simulate(schedule, model.costs(plan, schedule))
    stops = {s.track: s.stop for s in timeline.spans() if s.kind == "F"}
    slow = [rank for rank in range(4) if stops[timeline.track_of(rank)] > min(stops.values()) * 1.5]
    assert slow == ([2] if shards == 1 else [2, 3])
    assert timeline.makespan == simulate(schedule, model.costs(plan, schedule, lanes=False)).makespan


def _layer():
    from hetmesh.cost import LayerShape, WeightShape

    return LayerShape("layer0", (WeightShape("layer0.w", (512, 512), 1),), 512)
