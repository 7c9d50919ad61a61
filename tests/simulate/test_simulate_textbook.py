"""Simulated timelines against what can be computed by hand."""

from dataclasses import replace

import pytest
from graphs import encoder_and_llm, equal_costs, module, pipeline

from analysis.latest_starts import dependency_points, latest_starts
from analysis.lower_bounds import busiest_rank, critical_path
from hetmesh.cost import StageBytes, StageCost, StepCosts, TransferCost
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, Edge, ModuleGraph, Route, Stage, stage_graph
from hetmesh.schedule import POLICIES, Kind, PolicyOptions, interleaved, one_f_one_b, sequential, zero_bubble
from hetmesh.simulate import average_bubbles, bubbles, simulate

ONE_TWO = StageCost(1.0, 1.0, 1.0)
SIZES = [(1, 1), (2, 2), (2, 7), (4, 4), (4, 8), (4, 9), (8, 16)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_fraction_of_1f1b(p, m):
    stages = pipeline(p)
    timeline = simulate(one_f_one_b(stages, m), equal_costs(stages, m, ONE_TWO))
    assert timeline.makespan == 3 * (m + p - 1)
    assert [b.fraction for b in bubbles(timeline)] == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 16)])
def test_bubble_fraction_of_interleaved(p, v, m, early):
    stages = pipeline(p, v)
    schedule = interleaved(stages, m, options=PolicyOptions(early=early))
    timeline = simulate(schedule, equal_costs(stages, m, ONE_TWO))
    assert [b.fraction for b in bubbles(timeline)] == pytest.approx([(p - 1) / (v * m + p - 1)] * p)


@pytest.mark.parametrize(("early", "starts"), [(False, [16, 19, 22, 25]), (True, [8, 9, 10, 16])])
def test_o5_the_late_warm_up_keeps_makespan_57_and_defers_stage_0(early, starts):
    stages = pipeline(4, 2)
    timeline = simulate(interleaved(stages, 8, options=PolicyOptions(early=early)), equal_costs(stages, 8, ONE_TWO))
    assert timeline.makespan == 57
    forwards = [s for s in timeline.spans(0) if s.kind == "F" and s.target == "llm.0"]
    assert [s.start for s in forwards][4:] == starts


def test_o5_dependency_points():
    stages = pipeline(4, 2)
    costs = equal_costs(stages, 8, ONE_TWO)
    late, early = (interleaved(stages, 8, options=PolicyOptions(early=early)) for early in (False, True))
    points = dependency_points(late, costs, 57, Stage("llm"))
    assert points.forward == (0, 1, 2, 3, 16, 19, 22, 25)
    assert points.backward[-1] == 57
    # The early order can be deferred too, but not as far: on rank 0 the forward of microbatch 8 and all that comes
    # after it take 35 seconds, so in this order it cannot start after 22.
    forward = dependency_points(early, costs, 57, Stage("llm")).forward
    assert forward[4:] == (14, 16, 17, 20)


def test_latest_starts_are_no_earlier_than_starts_and_refuse_a_short_makespan():
    stages = pipeline(4)
    schedule, costs = zero_bubble(stages, 6), equal_costs(stages, 6, StageCost(1.0, 1.5, 0.5))
    makespan = simulate(schedule, costs).makespan
    latest = dict(zip(map(str, schedule.actions), latest_starts(schedule, costs, makespan).tolist(), strict=True))
    for span in simulate(schedule, costs).spans():
        if span.kind != "REDUCE":
            assert latest[f"{span.target} {span.kind}{span.microbatch}"] >= span.start - 1e-9
    assert min(latest.values()) == 0
    with pytest.raises(GraphError, match="too short"):
        latest_starts(schedule, costs, makespan - 0.5)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_is_shorter_than_1f1b(p, m):
    stages = pipeline(p)
    costs = equal_costs(stages, m, StageCost(1.0, 1.0, 1.0))
    short, long = (simulate(policy(stages, m), costs).makespan for policy in (zero_bubble, one_f_one_b))
    assert short < long


def test_classes_of_1f1b():
    stages = pipeline(4)
    first, *_, last = bubbles(simulate(one_f_one_b(stages, 8), equal_costs(stages, 8, ONE_TWO)))
    assert (first.pp_warmup, first.pp_cooldown, first.pp_other) == (0, 0, 9)
    assert (last.pp_warmup, last.pp_cooldown, last.pp_other) == (3, 6, 0)


def test_sequential_runs_one_stage_at_a_time():
    stages = pipeline(3)
    timeline = simulate(sequential(stages, 2), equal_costs(stages, 2, ONE_TWO))
    assert timeline.makespan == 2 * 3 * 3
    assert average_bubbles(timeline).fraction == pytest.approx(2 / 3)


def test_gathers_reductions_optimizer_and_collectives_have_their_classes():
    stages = pipeline(2)
    a, b = stages.stages
    costs = equal_costs(
        stages, 1, StageCost(2.0, 2.0, 2.0, 0.5, 0.25), gather={a: 1.0, b: 1.0}, reduce={a: 3.0, b: 1.0},
        optimizer={0: 1.0, 1: 1.0},
    )  # fmt: skip
    timeline = simulate(one_f_one_b(stages, 1), costs)
    # rank 0: gather 0-1, F 1-3, B 9-13, reduce 13-16; rank 1: gather 0-1, F 3-5, B 5-9, reduce 9-10
    assert timeline.makespan == 17
    first, second = bubbles(timeline)
    assert (first.dp_gather, first.pp_other, first.dp_scatter, first.tp, first.compute) == (1, 6, 3, 0.75, 6.25)
    assert (second.dp_gather, second.pp_warmup, second.dp_scatter, second.pp_cooldown) == (1, 2, 1, 6)
    assert busiest_rank(one_f_one_b(stages, 1), costs) == 8
    assert critical_path(one_f_one_b(stages, 1), costs) == 17


def test_a_reduction_runs_beside_later_work():
    stages = pipeline(1, 2)
    costs = equal_costs(stages, 1, StageCost(1.0, 2.0), reduce=dict.fromkeys(stages.stages, 2.0))
    timeline = simulate(one_f_one_b(stages, 1), costs)
    assert timeline.makespan == 1 + 1 + 2 + 2 + 2
    (only,) = bubbles(timeline)
    assert only.dp_scatter == 2


def test_transfers_run_beside_work():
    stages = encoder_and_llm(module("vision", [0], 1, trainable=False), module("llm", [1], 1))
    vision, llm = stages.stages
    costs = StepCosts(
        {(s, m): StageCost(1.0, 0.0, 2.0 if s == llm else 0.0) for s in stages.stages for m in range(2)},
        {Route(Edge(vision, llm), m, m): TransferCost(3.0, 8) for m in range(2)},
    )
    timeline = simulate(sequential(stages, 2), costs)
    # the link carries 1-4 and 4-7, the LLM works 4-7 and 7-10
    assert timeline.makespan == 10.0
    assert [span.start for span in timeline.spans(transfers=True)] == [1, 4]


def test_a_link_carries_one_transfer_at_a_time():
    stages = encoder_and_llm(module("vision", [0], 1, trainable=False), module("llm", [1], 1))
    costs = equal_costs(
        stages, 4, ONE_TWO, transfers={Route(stages.edges[0], m, m): TransferCost(3.0) for m in range(4)}
    )
    assert simulate(one_f_one_b(stages, 4), costs).makespan == 1 + 4 * 3 + 3


def test_overhead_comes_with_every_action_and_recomputation_with_the_backward():
    stages = pipeline(1)
    plain = equal_costs(stages, 2, ONE_TWO, action_overhead=0.5)
    assert simulate(one_f_one_b(stages, 2), plain).makespan == 2 * 3 + 4 * 0.5 + 0.5
    both = encoder_and_llm(module("vision", [0], 1), module("llm", [0], 1))
    again = POLICIES["three_phase"](both, 2, options=PolicyOptions(recompute=True))
    assert simulate(again, equal_costs(both, 2, ONE_TWO)).makespan == 2 * (3 + 4)


def test_overhead_is_no_computation():
    """As in a recording, where a span ends with its computation: 2 microbatches of 1 + 2 s, 0.5 s after each action and
    0.5 s more with the sum of gradients."""
    stages = pipeline(1)
    timeline = simulate(one_f_one_b(stages, 2), equal_costs(stages, 2, ONE_TWO, action_overhead=0.5))
    (only,) = bubbles(timeline)
    assert only.compute == 2 * 3
    assert only.pp_other == 3 * 0.5  # between four actions; after the last one gradients are summed
    assert only.fraction == pytest.approx((4 * 0.5 + 0.5) / timeline.makespan)
    assert next(span.stop for span in timeline.spans(0) if span.kind == "F") == 1.0


def test_memory_holds_as_many_activations_as_are_in_flight():
    stages = pipeline(4)
    costs = equal_costs(stages, 8, StageCost(1.0, 1.0, 1.0, activation_bytes=10), static_bytes={0: 1000, 3: 500})
    assert simulate(one_f_one_b(stages, 8), costs).peak_bytes == (1040, 30, 20, 510)


def test_memory_of_three_phases_with_recomputation_and_offloading():
    stages = encoder_and_llm(module("vision", [0], 1), module("llm", [0], 1))
    costs = equal_costs(stages, 4, StageCost(1.0, 1.0, 1.0, activation_bytes=10))
    peaks = {}
    for name, options in {
        "plain": PolicyOptions(),
        "recompute": PolicyOptions(recompute=True),
        "offload": PolicyOptions(offload=True),
    }.items():
        peaks[name] = simulate(POLICIES["three_phase"](stages, 4, options=options), costs).peak_bytes
    assert peaks == {"plain": (50,), "recompute": (10,), "offload": (10,)}


def test_memory_of_gradients_gathered_weights_sums_and_moments():
    """Of 1000 bytes for the whole run 400 are gradients, which come with the first backward."""
    stages = pipeline(1)
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=10, forward_bytes=30, backward_bytes=5)

    def peak(microbatches, **held):
        own = {stages.stages[0]: StageBytes(gradients=400, **held)}
        costs = equal_costs(stages, microbatches, cost, static_bytes={0: 1000}, stage_bytes=own)
        return simulate(one_f_one_b(stages, microbatches), costs).peak_bytes

    assert peak(1) == peak(1, gathered=70) == (1000 + 5,)  # in the backward 600 + 70 + 10 + 5
    assert peak(2) == (1000 + 10 + 30,)
    assert peak(2, gathered=70) == (1000 + 70 + 10 + 30,)
    assert peak(2, gathered=70, summed=200) == (1000 + 200,)  # when activations and gathered weights are gone
    both = pipeline(2)
    split = equal_costs(both, 1, StageCost(1.0, 1.0, 1.0, activation_bytes=10, backward_bytes=5, split_bytes=20))
    assert simulate(zero_bubble(both, 1), split).peak_bytes == (10 + 5, 10 + 20)  # the first backward is whole


def test_memory_of_buffers_and_of_outputs_without_a_backward():
    stages = encoder_and_llm(module("vision", [0], 1, trainable=False), module("llm", [1], 1))
    edge = stages.edges[0]
    transfers = {Route(edge, m, m): TransferCost(0.0, 7) for m in range(4)}
    costs = equal_costs(stages, 4, StageCost(1.0, 0.0, 1.0), transfers=transfers)
    schedule = one_f_one_b(stages, 4)
    most = schedule.in_flight[stages.stages[0]]
    assert simulate(schedule, costs).peak_bytes == (7 * most, 7 * most)


def test_ranks_that_hold_the_same_stages_share_a_row():
    stages = encoder_and_llm(module("vision", list(range(8)), 1), module("llm", list(range(8)), 4))
    timeline = simulate(one_f_one_b(stages, 2), equal_costs(stages, 2, ONE_TWO))
    assert timeline.tracks == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert timeline.holds[1] == ("vision.0", "llm.1")
    assert timeline.track_of(5) == 2


def test_a_missing_cost_is_named():
    stages = pipeline(2)
    costs = equal_costs(stages, 2, ONE_TWO)
    with pytest.raises(GraphError, match=r"none for llm\.0 F2"):
        simulate(one_f_one_b(stages, 3), costs)


def test_without_training_there_is_no_optimizer():
    stages = pipeline(2)
    costs = equal_costs(stages, 3, ONE_TWO, optimizer={0: 5.0, 1: 5.0})
    schedule = one_f_one_b(stages, 3, training=False)
    assert {a.kind for a in schedule.actions} == {Kind.FORWARD, Kind.SEND, Kind.RECV}
    assert simulate(schedule, costs).makespan == 4


def test_ranks_with_more_stages_than_others_still_overlap():
    """A frozen encoder, a projector and the first third of an LLM against the rest of it: equal work on both ranks."""
    encoder = module("vision", [0], 1, trainable=False)
    graph = ModuleGraph(
        (encoder, module("projector", [0], 1), module("llm", [0, 1], 2)),
        (BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm")),
    )
    stages, m = stage_graph(graph), 20
    each = (StageCost(6.0), StageCost(0.0), StageCost(2.0, 2.0, 2.0), StageCost(4.0, 4.0, 4.0))
    costs = {(s, i): cost for s, cost in zip(stages.stages, each, strict=True) for i in range(m)}
    bound = (m - 1) * 12 + 24  # the slowest rank, and the way of one microbatch
    assert simulate(POLICIES["1f1b"](stages, m), StepCosts(costs)).makespan <= 1.1 * bound


def test_busy_ranks_slow_each_other_down():
    # Two stages of 2 and 4 seconds per direction; the second goes on alone once the first has nothing to do.
    stages = pipeline(2)
    first, second = stages.stages
    costs = StepCosts(
        {(first, m): StageCost(2.0) for m in range(2)} | {(second, m): StageCost(4.0) for m in range(2)},
        busy_slowdown=(1.0, 1.5),
    )
    timeline = simulate(one_f_one_b(stages, 2, False), costs)
    spans = {(s.target, s.microbatch): (s.start, s.stop) for s in timeline.spans()}
    # F0 alone; then F1 of the first beside F0 of the second, both at 1/1.5, then 2 of its 4 seconds are left.
    assert spans == {
        ("llm.0", 0): (0, 2),
        ("llm.0", 1): (2, 5),
        ("llm.1", 0): (2, 7),
        ("llm.1", 1): (7, 11),
    }
    apart = simulate(one_f_one_b(stages, 2, False), replace(costs, ranks_per_node=1))
    assert apart.makespan == 2 + 4 + 4


def test_optimizers_of_busy_ranks_slow_each_other_down():
    stages = pipeline(2)
    costs = replace(equal_costs(stages, 1, ONE_TWO), optimizer={0: 1.0, 1: 3.0}, busy_slowdown=(1.0, 2.0))
    # 6 seconds, then both until 1 second of work is done at half the speed, then the other's 2 that are left.
    assert simulate(one_f_one_b(stages, 1), costs).makespan == 6 + 2 + 2


def test_rows_do_not_wait_for_a_gradient_that_comes_later_over_another_edge():
    stages = pipeline(4)
    schedule = one_f_one_b(stages, 16)
    edges = (*stages.edges, *(edge.reversed for edge in stages.edges))
    messages = {route: TransferCost(1e-3) for edge in edges for route in schedule.routes.along(edge)}
    free, slow = (
        simulate(schedule, equal_costs(stages, 16, ONE_TWO, transfers=each)).makespan for each in ({}, messages)
    )
    assert slow < free + 0.1
