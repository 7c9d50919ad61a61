"""bubble_fill: what it finds is valid, better than the coarse placement, and hides what there are gaps for."""

import itertools

import pytest
from graphs import encoder_and_llm, module
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate_properties import random_costs, stage_graphs

from hetmesh.cost import Lanes
from hetmesh.errors import ScheduleError
from hetmesh.graph import BoundarySpec, ModuleGraph, Routes, Stage, stage_graph
from hetmesh.schedule import Kind, PolicyOptions, bubble_fill, peaks_in_flight
from hetmesh.schedule.bubble_fill import INNER_SCHEDULES, inner_schedule
from hetmesh.simulate import simulate
from support.random_routes import routes

SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def each_rank(stage_graph):
    return Lanes({stage: tuple((rank,) for rank in stage_graph.ranks_of(stage)) for stage in stage_graph.stages})


def computed(schedule, module=None):
    """Compute actions in order, of one module."""
    some = [a for a in schedule.actions if isinstance(a.target, Stage) and a.kind is not Kind.REDUCE]
    return [a for a in some if module in (None, a.target.module)]


def makespan(schedule, durations):
    """Of lanes that start by themselves, messages left out; an independent walk over the order."""
    stages, free, stops = schedule.stages, {}, {}
    for action in computed(schedule):
        stage, m = action.target, action.microbatch
        if action.kind is Kind.FORWARD:
            before = [
                (Kind.FORWARD, e.source, r.source) for e in stages.inputs(stage) for r in schedule.routes.into((e,), m)
            ]
        elif action.kind is Kind.BACKWARD_WEIGHT:
            before = [(Kind.BACKWARD_INPUT, stage, m)]
        else:
            ways = [r for e in stages.gradient_outputs(stage) for r in schedule.routes.out_of((e,), m)]
            kinds = {e.destination: Kind.BACKWARD_INPUT for e in stages.edges if e.destination in schedule.split}
            before = [(Kind.FORWARD, stage, m)]
            before += [(kinds.get(r.edge.destination, Kind.BACKWARD), r.edge.destination, r.destination) for r in ways]
        for rank in stages.ranks_of(stage):
            needed = [
                stops[b][rank] if b[1].module == stage.module and rank in stops[b] else max(stops[b].values())
                for b in before
            ]
            free[rank] = max([free.get(rank, 0.0), *needed]) + durations(action)
            stops.setdefault((action.kind, stage, m), {})[rank] = free[rank]
    return max(free.values())


@pytest.mark.parametrize(
    ("inner", "virtual", "alone", "most"),
    [("1f1b", 1, 33.0, 33.3), ("zero_bubble", 1, 30.0, 30.3), ("interleaved", 2, 28.5, 30.6)],
)
def test_what_fits_into_gaps_costs_nothing(inner, virtual, alone, most):
    """An encoder of a tenth of the LLM's work, data parallel over its four ranks, in four slices. 1F1B hides all but
    the first forward and the last backward; interleaved stages of the first rank end after all of those of the last."""
    stages = encoder_and_llm(module("vision", [0, 1, 2, 3], 1, 4), module("llm", [0, 1, 2, 3], 4, 4 * virtual))
    options = PolicyOptions(inner=inner)

    def durations(action):
        return SECONDS[action.kind] * (0.025 if action.target.module == "vision" else 1 / virtual)

    schedule = bubble_fill(stages, 8, True, options, durations=durations, lanes=each_rank(stages))
    by_itself = inner_schedule(stages, Routes.of(stages, 8), True, options)
    assert makespan(by_itself, durations) <= alone + 3.0
    assert makespan(schedule, durations) <= most + 1e-9
    for rank in range(4):  # the LLM's own order is untouched
        own = [a for a in computed(schedule, "llm") if rank in stages.ranks_of(a.target)]
        assert own == [a for a in computed(by_itself) if rank in stages.ranks_of(a.target)]
    assert bubble_fill(stages, 8, True, options, durations=durations, lanes=each_rank(stages)) == schedule


def test_stages_of_an_encoder_that_take_turns_do_not_wait_for_one_microbatch_to_come_round():
    """An encoder that is a pipeline of two stages per rank along the LLM's ranks and may hold half of the step."""
    stages = encoder_and_llm(module("vision", [0, 1, 2, 3], 4, 8), module("llm", [0, 1, 2, 3], 4, 8))

    def durations(action):
        return SECONDS[action.kind] * (0.25 if action.target.module == "vision" else 0.5)

    def seconds(refine):
        options = PolicyOptions(inner="interleaved", in_flight=8, refine=refine)
        return makespan(bubble_fill(stages, 16, True, options, durations=durations, lanes=each_rank(stages)), durations)

    assert seconds(refine=True) < 0.91 * seconds(refine=False)


def test_what_each_way_of_placing_finds_is_scored():
    """The score knows what passes do not: of two orders the one that passes take for the longer may be the shorter."""
    stages = encoder_and_llm(module("vision", [0, 1, 2, 3], 4, 8), module("llm", [0, 1, 2, 3], 4, 8))

    def durations(action):
        return SECONDS[action.kind] * (0.2 if action.target.module == "vision" else 0.5)

    told = []

    def score(schedule):
        told.append((makespan(schedule, durations), schedule))
        return -told[-1][0]  # the longest is the best

    options = PolicyOptions(inner="interleaved")
    schedule = bubble_fill(stages, 8, True, options, durations=durations, lanes=each_rank(stages), score=score)
    coarse, *refined = (seconds for seconds, _ in told)
    assert len(set(refined)) > 1
    assert makespan(schedule, durations) == max(coarse, *refined)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_o6_refined_is_never_slower_than_coarse(data):
    stages = data.draw(stage_graphs())
    some, training = data.draw(routes(stages)), data.draw(st.booleans())
    cap = data.draw(st.sampled_from([None, 1, 2, 3]))  # raised where the order needs more: it always goes through
    options = PolicyOptions(inner=data.draw(st.sampled_from(INNER_SCHEDULES)), in_flight=cap, raise_in_flight=True)
    costs = data.draw(random_costs(bubble_fill(stages, some, training, options)))
    scores = []

    def durations(action):
        cost = costs.stages[action.target, action.microbatch]
        parts = {Kind.FORWARD: cost.forward, Kind.BACKWARD: cost.backward, Kind.BACKWARD_INPUT: cost.backward_input}
        return parts.get(action.kind, cost.backward_weight)

    def score(schedule):
        scores.append(simulate(schedule, costs).makespan)
        return scores[-1]

    lanes = data.draw(st.sampled_from([None, each_rank(stages)]))
    schedule = bubble_fill(stages, some, training, options, durations=durations, score=score, lanes=lanes)
    coarse = scores[0]
    assert simulate(schedule, costs).makespan == min(scores) <= coarse


def test_microbatches_of_which_the_encoder_is_done_first_come_first():
    """The first microbatch has all the images: the LLM begins with another one."""
    stages = encoder_and_llm(module("vision", [0, 1], 1, 2), module("llm", [0, 1], 2))

    def durations(action):
        own = 3.0 if action.microbatch == 0 else 0.25
        return SECONDS[action.kind] * (own if action.target.module == "vision" else 1.0)

    schedule = bubble_fill(stages, 4, durations=durations, lanes=each_rank(stages))
    forwards = [a.microbatch for a in computed(schedule) if a.target == Stage("llm", 0) and a.kind is Kind.FORWARD]
    assert forwards == [1, 2, 3, 0]
    assert [a.microbatch for a in computed(schedule, "vision")[:2]] == [1, 1]


def test_encoders_hold_no_more_than_they_may():
    stages = encoder_and_llm(module("vision", [0, 1, 2, 3], 1, 2), module("llm", [0, 1, 2, 3], 4))
    with pytest.raises(ScheduleError, match=r"stage vision.0 may hold 3 microbatches .* needs 4"):
        bubble_fill(stages, 16, options=PolicyOptions(in_flight=3))
    for most in (4, 6, 16):
        schedule = bubble_fill(stages, 16, options=PolicyOptions(in_flight=most))
        peaks = peaks_in_flight(schedule.actions, stages, schedule.routes)
        assert max(peaks[s] for s in stages.of_module("vision")) <= most
    one = encoder_and_llm(module("vision", [0, 1], 1), module("llm", [0, 1], 2))
    idle = Routes.make({"vision": 3, "llm": 1}, {("vision", "llm"): [(0, 0), (2, 0)]})  # the second goes backward first
    schedule = bubble_fill(one, idle, options=PolicyOptions(in_flight=1, raise_in_flight=True))
    assert peaks_in_flight(schedule.actions, one, idle)[Stage("vision")] == schedule.in_flight[Stage("vision")] == 2
    with pytest.raises(ScheduleError, match="no inner schedule 'gpipe'; valid are 1f1b, interleaved, zero_bubble"):
        bubble_fill(stages, 16, options=PolicyOptions(inner="gpipe"))


@pytest.mark.parametrize("inner", INNER_SCHEDULES)
def test_without_backwards_the_llm_holds_what_it_does_by_itself(inner):
    """Evaluation: nothing but what reads an output ends the time for which it is kept."""
    llm = module("llm", [0, 1], 2, 4 if inner == "interleaved" else 2)
    modules = module("vision", [0, 1], 1, 2), module("projector", [0], 1), llm
    graph = ModuleGraph(modules, (BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm")))
    stages, options = stage_graph(graph), PolicyOptions(inner=inner, in_flight=2)
    schedule = bubble_fill(stages, 4, False, options)
    by_itself = inner_schedule(stages, Routes.of(stages, 4), False, options)
    peaks = peaks_in_flight(schedule.actions, stages, schedule.routes, False)
    assert all(peaks[stage] <= held for stage, held in by_itself.in_flight.items())


def test_several_encoders_share_the_gaps():
    """One encoder per rank of the LLM's pipeline, each with microbatches of its own: Optimus' encoder pipelines."""
    encoders = [module(f"vision{i}", [i], 1, 6) for i in range(4)]
    llm = module("llm", list(range(4)), 4, 8)
    graph = ModuleGraph((*encoders, llm), tuple(BoundarySpec(e.name, "llm") for e in encoders))
    pairs = {(f"vision{i}", "llm"): [(k, 4 * k + i) for k in range(2)] for i in range(4)}
    some = Routes.make({**{e.name: 2 for e in encoders}, "llm": 8}, pairs)
    stages = stage_graph(graph)

    def durations(action):
        return SECONDS[action.kind] * (0.5 if action.target.module == "llm" else 0.4 / 6)

    schedule = bubble_fill(stages, some, True, PolicyOptions(inner="interleaved"), durations=durations)
    assert makespan(schedule, durations) == pytest.approx(28.5 + 3 * 0.4)  # by itself, one forward before, one backward
    labels = itertools.groupby(a.target.module for a in computed(schedule))
    assert sum(name != "llm" for name, _ in labels) > 12
