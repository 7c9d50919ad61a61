"""Costs, memory and timelines of steps whose microbatches feed others than those of their own number."""

import json

import numpy as np
import pytest
from graphs import encoder_and_llm, equal_costs, module
from test_step_model import MACHINE, assert_bytes_are_those_of_plans, setup

from analysis.latest_starts import dependency_points
from hetmesh.balance import BatchPlan
from hetmesh.cost import StageCost, StepCosts, TransferCost
from hetmesh.graph import BoundarySpec, Edge, ModuleGraph, ModuleSpec, Route, Routes, SampleMeta, Stage, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.report.timeline_text import trace
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.schedule import Action, Kind, one_f_one_b, sequential
from hetmesh.simulate import Timeline, peak_rows, simulate
from support.assignments import RandomAssignment

VISION, LLM = Stage("vision"), Stage("llm")
EDGE = Edge(VISION, LLM)


def two(**options):
    return encoder_and_llm(module("vision", [0], 1, **options), module("llm", [1], 1))


def fed(pairs, vision, llm):
    return Routes.make({"vision": vision, "llm": llm}, {("vision", "llm"): pairs})


@pytest.mark.parametrize("name", ["digits_cp_pp.toml", "digits_overlapping.toml"])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_of_every_route_are_those_of_its_plan(name, seed):
    recipe, shapes, graph, plan, _ = setup(name)
    plan = RandomAssignment(seed)(graph, plan.samples, 1)
    schedule = recipe_schedule(recipe, graph, plan.routes)
    costs = recipe_step_model(recipe, graph, shapes, machine=MACHINE).costs(plan, schedule)
    rows = assert_bytes_are_those_of_plans(costs, plan, schedule)
    boundaries = [edge for edge in schedule.stages.edges if not edge.internal]
    moved = {edge: rows[edge] for edge in boundaries}
    for edge, rows in moved.items():
        assert rows == sum(sample.rows[edge.source.module] for sample in plan.samples)
    assert {(s, m) for s, m in costs.stages} == {
        (s, m) for s in schedule.stages.stages for m in range(plan.routes.count(s.module))
    }
    assert simulate(schedule, costs).makespan > 0


def test_a_forward_waits_for_all_that_feed_it():
    """Two microbatches of the encoder, a second each, before the one of the LLM; then both backwards."""
    routes = fed([(0, 0), (1, 0)], 2, 1)
    timeline = simulate(
        sequential(two(), routes),
        StepCosts(
            {(s, m): StageCost(1, 0, 2) for s, m in ((VISION, 0), (VISION, 1), (LLM, 0))},
            {Route(EDGE, 1, 0): TransferCost(0.5)},
        ),
    )
    starts = {(s.kind, s.target, s.microbatch): s.start for s in timeline.spans()}
    assert starts["F", "llm.0", 0] == 2.5
    assert starts["B", "vision.0", 1] == 2.5 + 3 + 2
    assert timeline.makespan == 2.5 + 3 + 4
    (moved,) = [s for s in timeline.spans(transfers=True) if s.stop > s.start]
    assert moved.name == "vision.0->llm.0 SEND1>0"


def test_deferral_hides_what_uneven_microbatches_cost():
    """36 units of LLM work in microbatches of 3 and 9 alternately, moved so that each has 6 (Entrain's figure)."""
    heavy = [9.0, 3.0] * 3
    apart = {(LLM, m): StageCost(w) for m, w in enumerate(heavy)}
    even = {(LLM, m): StageCost(6.0) for m in range(6)}
    encoder = {(VISION, m): StageCost(3.0) for m in range(6)}
    late = fed([(m, m) for m in range(6)] + [(m, m + 1) for m in range(0, 5, 2)], 6, 6)
    stages = two(trainable=False)
    plain = simulate(one_f_one_b(stages, 6, False), StepCosts({**encoder, **apart})).makespan
    deferred = simulate(one_f_one_b(stages, late, False), StepCosts({**encoder, **even})).makespan
    assert deferred == 3 + 36
    assert plain >= deferred


def test_memory_of_rows_that_wait_for_the_next_microbatch():
    """Each transfer brings 10 bytes. In a sequence the encoder holds one activation more, and the LLM's rank rows that
    came ahead; where two parts are put together they are there twice for a moment."""
    stages, cost = two(), StageCost(1, 0, 2, activation_bytes=100)
    plain, late = Routes.of(stages, 3), fed([(0, 0), (1, 1), (2, 2), (0, 1), (1, 2)], 3, 3)
    peaks = {}
    for routes in (plain, late):
        ways = {r: TransferCost(0.0, 10) for r in routes.along(EDGE)}
        peaks[routes] = simulate(sequential(stages, routes), equal_costs(stages, 3, cost, transfers=ways)).peak_bytes
    assert peaks[plain] == (100, 110)
    assert peaks[late] == (200, 10 + 2 * 10 + 100)  # a part of the next one waits, two are read


def test_rows_held_are_those_between_forward_and_backward():
    vision = ModuleSpec("vision", MeshSpec.make([0, 1], dp_replicate=2), features=4)
    graph = ModuleGraph(
        (vision, ModuleSpec("llm", MeshSpec.make([2], dp_replicate=1))), (BoundarySpec("vision", "llm", "image"),)
    )
    samples = tuple(SampleMeta(f"s{i}", 10 + i, rows={"vision": rows}) for i, rows in enumerate((5, 7, 1, 2)))
    plan = BatchPlan(
        graph,
        samples,
        {"vision": (((0,), (1,)), ((2,), (3,))), "llm": (((0,),), ((1, 2, 3),))},
    )
    stages = stage_graph(graph)
    assert peak_rows(plan, sequential(stages, plan.routes)) == {VISION: 7 + 2, LLM: 11 + 12 + 13}
    by_number = BatchPlan(graph, samples, plan.lanes | {"llm": (((0, 1),), ((2, 3),))})
    assert peak_rows(by_number, sequential(stages, by_number.routes)) == {VISION: 7, LLM: 12 + 13}


def test_a_recording_and_its_trace_name_both_microbatches():
    routes = fed([(0, 0), (0, 1)], 1, 2)
    schedule = sequential(two(trainable=False), routes, training=False)
    at = {str(action): float(i) for i, action in enumerate(schedule.actions)}
    records = {rank: [(a, at[str(a)], at[str(a)] + 1) for a in schedule.of_rank(rank)] for rank in (0, 1)}
    timeline = Timeline.recorded(schedule, records)
    moved = list(timeline.spans(transfers=True))
    assert [(s.microbatch, s.to, s.start) for s in moved] == [
        (0, 0, at["vision.0->llm.0 SEND0"]),
        (0, 1, at["vision.0->llm.0 SEND0>1"]),
    ]
    events = {e["name"]: e["args"] for e in trace({"": timeline})["traceEvents"] if e["ph"] == "X"}
    assert events["vision.0->llm.0 SEND0>1"] == {"microbatch": 0, "to": 1}
    assert events["vision.0->llm.0 SEND0"] == {"microbatch": 0}
    assert Action(Kind.RECV, EDGE, 0, 1) in schedule.actions


def test_a_timeline_of_an_older_version_is_read():
    timeline = simulate(sequential(two(), 2), equal_costs(two(), 2, StageCost(1, 0, 2)))
    older = json.loads(json.dumps(timeline.as_json()))
    for part in ("work", "transfers"):
        older[part] = older[part][:6]
    again = Timeline.from_json(older)
    assert list(again.spans(transfers=True)) == list(timeline.spans(transfers=True))
    assert np.array_equal(again.work.to, timeline.work.microbatch)


def test_dependency_points_are_of_the_stage_s_own_microbatches():
    routes = fed([(0, 0), (1, 0), (2, 1), (3, 1)], 4, 2)
    schedule = one_f_one_b(two(), routes)
    costs = equal_costs(schedule.stages, 4, StageCost(1, 0, 1))
    makespan = simulate(schedule, costs).makespan
    assert [len(dependency_points(schedule, costs, makespan, s).forward) for s in (VISION, LLM)] == [4, 2]
