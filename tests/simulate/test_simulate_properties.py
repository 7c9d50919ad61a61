"""Random graphs, policies, routes and costs: schedules run through within bounds, and every second has a class."""

import itertools
import json
from dataclasses import replace

import pytest
from graphs import module
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.latest_starts import latest_starts
from analysis.lower_bounds import busiest_rank, critical_path
from hetmesh.cost import StageCost, StepCosts, TransferCost
from hetmesh.graph import BoundarySpec, ModuleGraph, StageGraph, stage_graph
from hetmesh.schedule import POLICIES, PolicyOptions, Schedule, validate
from hetmesh.simulate import CLASSES, Timeline, bubble_spans, bubbles, simulate
from support.random_routes import routes

SECONDS = st.integers(0, 8).map(lambda n: n / 4)  # exact in binary: sums have no rounding


@st.composite
def stage_graphs(draw: st.DrawFn) -> StageGraph:
    """One or two encoders of unequal pipeline depth before an LLM, on its ranks or their own, frozen or not."""
    depth = draw(st.sampled_from([1, 2, 4]))
    llm = module("llm", list(range(4)), depth, depth * draw(st.integers(1, 2)))
    modules, boundaries, next_rank = [], [], 4
    for name in ["vision", "audio"][: draw(st.integers(0, 2))]:
        pp = draw(st.sampled_from([1, 2]))
        if draw(st.booleans()):
            ranks = list(range(4))
        else:
            ranks = list(range(next_rank, next_rank + 2))
            next_rank += 2
        modules.append(module(name, ranks, pp, trainable=draw(st.booleans())))
        boundaries.append(BoundarySpec(name, "llm"))
    return stage_graph(ModuleGraph((*modules, llm), tuple(boundaries)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any policy over any graph."""
    stages, policy = draw(stage_graphs()), draw(st.sampled_from(sorted(POLICIES)))
    options = PolicyOptions(
        window=draw(st.sampled_from([None, 1, 2])),
        recompute=draw(st.booleans()),
        offload=draw(st.booleans()),
        early=draw(st.booleans()),
    )
    return POLICIES[policy](stages, draw(routes(stages)), draw(st.booleans()), options)


@st.composite
def random_costs(draw: st.DrawFn, schedule: Schedule) -> StepCosts:
    """Other seconds for every stage, edge and rank; of all microbatches, the first differs."""
    stages = schedule.stages
    some = draw(st.lists(SECONDS, min_size=7, max_size=7))
    salt = draw(st.integers(0, 1000))

    def pick(*key: object) -> float:
        return some[(sum(map(ord, str(key))) + salt) % len(some)]

    counted = range(schedule.routes.most)
    ways = [route for e in stages.edges for route in schedule.routes.along(e)]
    ways += [route.reversed for route in ways]
    return StepCosts(
        {
            (s, m): StageCost(
                pick(s, m, "f") + 0.25, pick(s, m, "i"), pick(s, m, "w"), 0.125, 0.0, int(8 * pick(s, m, "a"))
            )
            for s in stages.stages
            for m in counted
        },
        {r: TransferCost(pick(r.edge, r.source == 0), int(8 * pick(r.edge))) for r in ways},
        {s: pick(s, "g") for s in stages.stages},
        {s: pick(s, "r") for s in stages.stages},
        {r: pick(r) for r in range(8)},
        {r: 100 + r for r in range(8)},
        draw(SECONDS) / 8,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StepCosts]:
    """A schedule and its costs."""
    schedule = draw(schedules())
    return schedule, draw(random_costs(schedule))


@pytest.mark.slow
@settings(max_examples=300)
@given(case=cases())
def test_every_schedule_runs_through_within_its_bounds(case):
    schedule, costs = case
    timeline = simulate(validate(schedule), costs)
    assert timeline.makespan >= critical_path(schedule, costs)
    assert timeline.makespan >= busiest_rank(schedule, costs)
    for held in bubbles(timeline):
        assert held.compute + held.idle == pytest.approx(timeline.makespan, abs=1e-9)
        assert min(held.compute, *(getattr(held, name) for name in CLASSES)) >= 0
    works = [a for a in schedule.actions if a.kind.value in ("F", "B", "I", "W", "REDUCE")]
    rows = {name: sum(name in held for held in timeline.holds) for name in map(str, schedule.stages.stages)}
    expected = sum(rows[str(a.target)] for a in works)
    assert sum(span.kind not in ("GATHER", "OPTIMIZER") for span in timeline.spans()) == expected
    assert all(peak >= 100 for peak in timeline.peak_bytes)


@pytest.mark.slow
@settings(max_examples=150)
@given(case=cases())
def test_no_rank_does_two_things_at_a_time_and_inputs_come_first(case):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    stops = {}
    for track in range(len(timeline.tracks)):
        own = [s for s in timeline.spans(track) if s.kind != "REDUCE"]
        assert all(a.stop <= b.start for a, b in itertools.pairwise(own))
        stops |= {(s.kind, s.target, s.microbatch): s.stop for s in own}
    kinds = dict.fromkeys(map(str, schedule.stages.edges), ("F",))
    for span in timeline.spans(transfers=True):
        source = span.target.split("->")[0]
        made = [
            stops[key]
            for kind in kinds.get(span.target, ("B", "I"))
            if (key := (kind, source, span.microbatch)) in stops
        ]
        assert made
        assert made[0] <= span.start


@settings(max_examples=100)
@given(case=cases())
def test_latest_starts_hold_every_start(case):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    latest = dict(zip(map(str, schedule.actions), latest_starts(schedule, costs, timeline.makespan), strict=True))
    for span in timeline.spans():
        if span.kind in ("F", "B", "I", "W"):
            assert latest[f"{span.target} {span.kind}{span.microbatch}"] >= span.start - 1e-9
        elif span.kind == "REDUCE":
            assert latest[f"{span.target} REDUCE"] >= span.start - 1e-9


@settings(max_examples=50)
@given(case=cases())
def test_classes_agree_with_looking_at_every_interval(case):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    for track, held in enumerate(bubbles(timeline)):
        spans = list(timeline.spans(track))
        layers = [s for s in spans if s.kind in ("F", "B", "I", "W")]
        seconds = dict.fromkeys((*CLASSES, "compute"), 0.0)
        points = sorted({0.0, timeline.makespan, *(t for s in spans for t in (s.start, s.stop))})
        for start, stop in itertools.pairwise(points):
            running = {s.kind for s in spans if s.start <= start and stop <= s.stop and s.start < s.stop}
            if running & {"F", "B", "I", "W", "OPTIMIZER"}:
                name = "compute"
            elif "GATHER" in running:
                name = "dp_gather"
            elif "REDUCE" in running:
                name = "dp_scatter"
            elif stop <= min(s.start for s in layers):
                name = "pp_warmup"
            else:
                name = "pp_cooldown" if start >= max(s.stop for s in layers) else "pp_other"
            seconds[name] += stop - start
        assert held.compute + held.tp == pytest.approx(seconds["compute"])
        for name in CLASSES[:-1]:
            assert getattr(held, name) == pytest.approx(seconds[name]), name
        gaps = bubble_spans(timeline, track)
        assert sum(stop - start for _, start, stop in gaps) == pytest.approx(held.idle - held.tp)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    case=cases(),
    slowdown=st.sampled_from([(1.0, 1.5), (1.0, 1.25, 2.0, 2.0, 4.0), (1.0, 1.0, 1.1)]),
    ranks_per_node=st.sampled_from([0, 1, 2, 4]),
)
def test_every_action_gets_its_work_done_at_the_pace_that_its_busy_neighbours_leave(case, slowdown, ranks_per_node):
    schedule, alone = case
    alone = replace(alone, action_overhead=0.0)  # which no span covers
    costs = replace(alone, busy_slowdown=slowdown, ranks_per_node=ranks_per_node)
    timeline, before = simulate(schedule, costs), simulate(schedule, alone)
    assert timeline.makespan >= before.makespan - 1e-9 or ranks_per_node != 0
    seconds = {(s.track, s.kind, s.target, s.microbatch): s.stop - s.start for s in before.spans()}
    spans = list(timeline.spans())
    working = [s for s in spans if s.kind not in ("GATHER", "REDUCE")]
    points = sorted({t for s in spans for t in (s.start, s.stop)})
    done = dict.fromkeys(seconds, 0.0)
    stage_tracks: dict[tuple[str, str, int], list[int]] = {}  # an action over several tracks goes on at one pace
    for s in working:
        stage_tracks.setdefault((s.kind, s.target, s.microbatch), []).append(s.track)
    for start, stop in itertools.pairwise(points):
        running = [s for s in working if s.start <= start and stop <= s.stop]
        busy: dict[int, int] = {}
        for s in running:
            for rank in timeline.tracks[s.track]:
                node = rank // ranks_per_node if ranks_per_node else 0
                busy[node] = busy.get(node, 0) + 1
        for s in running:
            together = stage_tracks[s.kind, s.target, s.microbatch] if s.target else [s.track]
            ranks = [rank for track in together for rank in timeline.tracks[track]]
            most = max(busy[rank // ranks_per_node if ranks_per_node else 0] for rank in ranks)
            key = (s.track, s.kind, s.target, s.microbatch)
            done[key] += (stop - start) / slowdown[min(most, len(slowdown)) - 1]
    for s in spans:
        key = (s.track, s.kind, s.target, s.microbatch)
        got = done[key] if s in working else s.stop - s.start
        assert got == pytest.approx(seconds[key], abs=1e-9), s


@pytest.mark.slow
@settings(max_examples=100)
@given(case=cases())
def test_a_slowdown_of_one_leaves_every_second_as_it_is(case):
    schedule, costs = case
    nearly = replace(costs, busy_slowdown=(1.0, 1.0, 1.0 + 1e-13))
    spans = [
        (list(each.spans()), list(each.spans(transfers=True)))
        for each in (simulate(schedule, costs), simulate(schedule, nearly))
    ]
    for some, others in zip(*spans, strict=True):
        assert [(s.kind, s.target, s.microbatch, s.track) for s in some] == [
            (s.kind, s.target, s.microbatch, s.track) for s in others
        ]
        assert [(s.start, s.stop) for s in others] == [pytest.approx((s.start, s.stop), abs=1e-9) for s in some]


@settings(max_examples=25)
@given(case=cases())
def test_json_and_back(case):
    timeline = simulate(*case)
    value = json.loads(json.dumps(timeline.as_json()))
    again = Timeline.from_json(value)
    assert again.as_json() == value
    assert list(again.spans()) == list(timeline.spans())
    assert (again.tracks, again.holds, again.peak_bytes) == (timeline.tracks, timeline.holds, timeline.peak_bytes)


@settings(max_examples=25)
@given(stages=stage_graphs())
def test_rank_classes_hold_what_their_ranks_hold(stages):
    classes = stages.rank_classes()
    assert sorted(rank for ranks, _ in classes for rank in ranks) == sorted(
        {r for ranks in stages.ranks for r in ranks}
    )
    for ranks, held in classes:
        for rank in ranks:
            assert [i for i, on in enumerate(stages.ranks) if rank in on] == list(held)
    assert len({held for _, held in classes}) == len(classes)
