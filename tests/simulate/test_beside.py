"""Parts of actions, and encoder kernels beside the LLM's collectives: by hand, and properties of drawn cases."""

import itertools
import sys
from dataclasses import replace

import pytest
from graphs import encoder_and_llm, equal_costs, module
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.balance import plan_batch
from hetmesh.cost import LayerShape, ModuleShape, StageCost, StageParts, StepCosts, WeightShape, Work, load_machine
from hetmesh.errors import GraphError
from hetmesh.graph import Activation, BoundarySpec, MediaItem, ModuleGraph, ModuleSpec, Routes, SampleMeta, Stage
from hetmesh.graph.module_graph import ModuleOptions
from hetmesh.layout import MeshSpec
from hetmesh.schedule import POLICIES, Kind, PolicyOptions, bubble_fill
from hetmesh.simulate import StepModel, bubbles, simulate
from hetmesh.simulate.action_parts import filled
from hetmesh.simulate.fill_bubbles import fill_typical_beside

VISION, LLM = Stage("vision"), Stage("llm")


def block(name: str, width: int) -> LayerShape:
    square = [WeightShape(f"{name}.{w}", (width, width), 1, tp_dim=0) for w in ("q", "k", "v")]
    weights = (
        *square,
        WeightShape(f"{name}.o", (width, width), 1, tp_dim=1),
        WeightShape(f"{name}.up", (4 * width, width), 1, tp_dim=0),
        WeightShape(f"{name}.down", (width, 4 * width), 1, tp_dim=1),
    )
    return LayerShape(name, weights, width)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_parts_add_up_to_what_actions_take(recompute, frozen, shards):
    options = ModuleOptions(activation_checkpoint=recompute)
    lanes = {"dp_shard": 2} if shards == 2 else {"dp_replicate": 2}
    layers = ("a", "b")
    vision = ModuleSpec(
        "vision", MeshSpec.make(range(8), **lanes, tp=4), layers, "image", not frozen, 64, options=options
    )
    llm = ModuleSpec("llm", MeshSpec.make(range(8), **lanes, tp=4), layers, options=options)
    graph = ModuleGraph((vision, llm), (BoundarySpec("vision", "llm", "image"),))
    shapes = {n: ModuleShape(n, tuple(block(x, w) for x in layers)) for n, w in (("vision", 64), ("llm", 128))}
    if frozen:
        shapes["vision"] = ModuleShape(
            "vision",
            tuple(
                replace(x, weights=tuple(replace(w, trainable=False) for w in x.weights))
                for x in shapes["vision"].layers
            ),
        )
    model = StepModel(graph, shapes, replace(load_machine("h100"), peak_flops={"float32": 1e13}))
    samples = [
        SampleMeta(f"s{i}", 64 + i, (MediaItem("image", (3, 1, 1), 0, 16 + i),), ((20, 60),), {"vision": 16 + i})
        for i in range(8)
    ]
    plan = plan_batch(graph, samples, 2)
    schedule = POLICIES["1f1b"](model.stages, plan.routes)
    costs = model.costs(plan, schedule, parts=True)
    for key, cost in costs.stages.items():
        parts = costs.parts[key]
        for seconds, some in (
            (cost.forward, parts.forward),
            (cost.backward_input, parts.backward_input),
            (cost.backward_weight, parts.backward_weight),
        ):
            assert sum(each for _, each in some) == pytest.approx(seconds, rel=1e-9)
        inside = sum(each for kind, each in parts.forward if kind not in ("attention", "mlp"))
        assert inside == pytest.approx(cost.collectives_forward)
        kinds = [kind for kind, _ in parts.forward if kind != "exchange"]
        assert kinds == ["attention", "collective", "mlp", "collective"] * 2
    assert not model.costs(plan, schedule).parts


def test_parts_of_an_action_fill_its_seconds():
    """Computation is longer than it was where the host launches it; without any, all is an exchange."""
    assert filled([("mlp", 1.0), ("collective", 0.5)], 3.0, 1.0) == (
        ("exchange", 0.5),
        ("mlp", 2.0),
        ("collective", 0.5),
    )
    assert filled([], 1.0, 0.25) == (("exchange", 1.0),)


def by_hand() -> tuple:
    """One rank with an LLM and an encoder, two microbatches."""
    stages = encoder_and_llm(module("vision", [0], 1), module("llm", [0], 1))
    schedule = POLICIES["three_phase"](stages, 2)
    costs = equal_costs(stages, 2, StageCost(4.0, 2.0, 2.0, 2.0, 2.0))
    cost = StageCost(1.0, 0.0, 1.5, 0.5, 0.5)
    llm = StageParts(
        (("attention", 1.0), ("collective", 1.0), ("mlp", 1.0), ("collective", 1.0)),
        (("mlp", 0.0), ("collective", 1.0), ("attention", 0.0), ("collective", 1.0)),
        (("mlp", 2.0),),
    )
    own = StageParts((("attention", 0.5), ("collective", 0.5)), (), (("attention", 1.0), ("collective", 0.5)))
    each = {(VISION, m): cost for m in range(2)} | {(LLM, m): costs.stages[LLM, m] for m in range(2)}
    parts = {(VISION, m): own for m in range(2)} | {(LLM, m): llm for m in range(2)}
    return schedule, replace(costs, stages=each, parts=parts)


def test_an_encoder_runs_in_the_collectives_of_the_llm():
    schedule, costs = by_hand()
    alone = simulate(schedule, costs)
    assert alone.makespan == 2 * (1.0 + 8.0 + 1.5)
    beside = simulate(schedule, costs, beside=["vision"])
    # The first forward is waited for: 1. The LLM then takes 16. The second forward's attention runs in the first
    # collective of the first LLM forward, its collective beside the next MLP. The first backward can begin when the
    # LLM's is over (9) and does so in the collective of the next forward (10 to 11), its own collective beside the MLP
    # behind that; the second one follows the LLM.
    assert beside.makespan == 1.0 + 16.0 + 1.5
    assert beside.hidden == (0.5 + 1.0,)
    (held,) = bubbles(beside)
    assert held.tp == 2 * (2.0 + 2.0) - 1.5 + 0.5 + 0.5  # of the LLM but for what is hidden, of both encoder ends
    assert held.compute + held.idle == pytest.approx(beside.makespan)


def test_an_action_that_collectives_did_not_hide_is_over_at_its_place():
    """As above, but each action of the encoder comes right before what needs it, or last."""
    schedule, costs = by_hand()
    options = PolicyOptions(in_collectives=True)
    late = POLICIES["bubble_fill"](schedule.stages, 2, True, options)
    assert [str(a) for a in late.actions if a.kind not in (Kind.SEND, Kind.RECV)] == [
        "vision.0 F0", "llm.0 F0", "llm.0 B0", "vision.0 F1", "llm.0 F1", "llm.0 B1", "llm.0 REDUCE",
        "vision.0 B0", "vision.0 B1", "vision.0 REDUCE",
    ]  # fmt: skip
    beside = simulate(late, costs, beside=["vision"])
    assert beside.makespan == simulate(schedule, costs, beside=["vision"]).makespan
    early = replace(costs, parts=costs.parts | {(VISION, 1): LONG})
    # Of the second forward (8) the collectives of the LLM's first microbatch hide 4; 4 come before its second one.
    stages = early.stages | {(VISION, 1): StageCost(8.0, 0.0, 1.5, 0.0, 0.5)}
    early = replace(early, stages=stages)
    assert simulate(late, early, beside=["vision"]).makespan == 1.0 + 8.0 + 4.0 + 8.0 + 1.5
    # A hand-over for the first collective, and one for the three behind the MLP, which follow each other.
    assert simulate(late, replace(early, hand_over=0.25), beside=["vision"]).makespan == 1.0 + 8.0 + 4.5 + 8.0 + 1.5


def test_a_thread_goes_on_to_its_next_stop_when_a_collective_is_over():
    schedule, costs = by_hand()
    late = POLICIES["bubble_fill"](schedule.stages, 2, True, PolicyOptions(in_collectives=True))
    forward = StageParts((("mlp", 2.0),), (), (("attention", 1.0), ("collective", 0.5)))
    costs = replace(
        costs,
        parts=costs.parts | {(VISION, 1): forward},
        stages=costs.stages | {(VISION, 1): StageCost(2.0, 0.0, 1.5, 0.0, 0.5)},
    )
    assert simulate(late, costs, beside=["vision"]).makespan == 1.0 + 8.0 + 8.0 + 1.5
    # 0.75 of the first of its two products fit into the first collective, and the LLM waits for the rest of it.
    timeline = simulate(late, replace(costs, hand_over=0.25), beside=["vision"])
    assert timeline.makespan == 1.0 + 8.0 + 0.25 + 8.0 + 1.5
    assert timeline.hidden == (0.75 + 1.0 + 1.0,)


def typical_orders(pp: int, latency: float) -> tuple:
    """Of encoders on the ranks of an LLM with TP 2, in eight microbatches that are alike: the order that is found, that
    with slices as late as they can be, and the seconds of both."""
    layers = ("a", "b", "c", "d")
    cut = {"splits": tuple((x,) for x in layers), "activation": Activation(64, True)}
    lanes = MeshSpec.make(range(2 * pp), dp_replicate=2 * pp)
    vision = ModuleSpec("vision", lanes, layers, "image", features=64, **cut)
    llm = ModuleSpec("llm", MeshSpec.make(range(2 * pp), pp=pp, tp=2), layers, **cut if pp > 1 else {})
    graph = ModuleGraph((vision, llm), (BoundarySpec("vision", "llm", "image"),))
    shapes = {n: ModuleShape(n, tuple(block(x, w) for x in layers)) for n, w in (("vision", 64), ("llm", 128))}
    machine = replace(load_machine("cpu"), peak_flops={"float32": 1e11}, node_latency=latency)
    model = StepModel(graph, shapes, machine)
    work = {"vision": Work(2048, 2048 * 64), "llm": Work(2048, 2048 * 512, 512)}.__getitem__
    routes, options = Routes.of(model.stages, 8), PolicyOptions(in_collectives=True)
    found = fill_typical_beside(model, routes, options, work, ["vision"])
    late = bubble_fill(model.stages, routes, True, options)
    costs = replace(model.typical_costs(routes, work), busy_slowdown=())
    steps = [simulate(schedule, costs, beside=["vision"]).makespan for schedule in (found, late)]
    return found.actions, late.actions, steps


def test_typical_microbatches_go_into_the_bubbles_of_a_pipeline_and_else_into_collectives():
    found, late, (step, latest) = typical_orders(pp=4, latency=1e-5)  # hardly any gaps, and a quarter of bubbles
    assert found != late
    assert step < 0.96 * latest
    found, late, _ = typical_orders(pp=1, latency=1e-3)
    assert found == late


def test_forwards_of_an_encoder_pipeline_are_tried_in_rounds_too():
    """Each as late as can be, and of as many microbatches as the LLM's pipeline has ranks: they follow each other."""
    stages, tried = encoder_and_llm(module("vision", [0, 1], 2), module("llm", [0, 1], 2)), []

    def score(schedule):
        tried.append(schedule)
        return -len(tried)  # the last one

    best = bubble_fill(stages, 4, True, PolicyOptions(in_collectives=True, refine=False), score=score)
    assert len(tried) == 3  # all first; one by one; in rounds
    assert [str(a) for a in best.actions if a.kind is Kind.FORWARD][:9] == [
        "vision.0 F0", "vision.1 F0", "vision.0 F1", "vision.1 F1", "llm.0 F0", "llm.1 F0", "llm.0 F1", "llm.1 F1",
        "vision.0 F2",
    ]  # fmt: skip


LONG = StageParts((("mlp", 8.0),), (), (("attention", 1.0), ("collective", 0.5)))


def test_what_cannot_run_beside_others_is_refused():
    schedule, costs = by_hand()
    with pytest.raises(GraphError, match="cannot run beside itself"):
        simulate(schedule, costs, beside=["llm"])
    with pytest.raises(GraphError, match=r"none for \['vision.0', 'llm.0'\]"):
        simulate(schedule, replace(costs, parts={}), beside=["vision"])


@pytest.mark.slow
def test_a_chain_of_streams_may_be_as_long_as_it_likes():
    """Each stage of the encoder waits for the one before, on a rank of its own: more than Python nests calls."""
    count = sys.getrecursionlimit() // 2
    stages = encoder_and_llm(module("vision", list(range(count)), count), module("llm", [0], 1))
    schedule = POLICIES["sequential"](stages, 1)
    own = StageParts((("mlp", 1.0),), (("mlp", 0.5),), (("mlp", 0.25),))
    each = dict.fromkeys(((stage, 0) for stage in stages.stages), StageCost(1.0, 0.5, 0.25))
    timeline = simulate(schedule, StepCosts(each, parts=dict.fromkeys(each, own)), beside=["vision"])
    assert timeline.makespan == (count + 1) * 1.75


SECONDS = st.integers(0, 8).map(lambda n: n / 4)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple:
    """An encoder data parallel over, or a pipeline along, the ranks of an LLM's pipeline; any policy; drawn parts."""
    p = draw(st.sampled_from([1, 2, 4]))
    encoder = module("vision", list(range(p)), draw(st.sampled_from([1, p])))
    stages = encoder_and_llm(encoder, module("llm", list(range(p)), p, p * draw(st.integers(1, 2))))
    policy = draw(st.sampled_from(["sequential", "1f1b", "interleaved", "zero_bubble", "three_phase", "bubble_fill"]))
    schedule = POLICIES[policy](stages, draw(st.integers(1, 5)))
    kinds = st.sampled_from(["attention", "mlp", "collective", "exchange"])
    own = st.lists(st.tuples(kinds, SECONDS), max_size=5).map(tuple)
    parts, costs = {}, {}
    for stage in stages.stages:
        some = StageParts(draw(own), draw(own), draw(own))
        seconds = [sum(s for _, s in each) for each in (some.forward, some.backward_input, some.backward_weight)]
        inside = [sum(s for k, s in each if k == "collective") for each in (some.forward, some.backward_input)]
        for m in range(5):
            parts[stage, m], costs[stage, m] = some, StageCost(*seconds, *inside)
    groups = {s: tuple((r,) for r in stages.ranks_of(s)) for s in stages.stages}
    from hetmesh.cost import Lanes

    hand_over = draw(st.sampled_from([0.0, 0.125]))
    return schedule, StepCosts(
        costs, parts=parts, hand_over=hand_over, lanes=Lanes(groups) if draw(st.booleans()) else None
    )


@pytest.mark.slow
@settings(max_examples=150)
@given(case=pipelines())
def test_nothing_is_counted_twice(case):
    schedule, costs = case
    timeline = simulate(schedule, costs, beside=["vision"])
    for track, held in enumerate(bubbles(timeline)):
        assert held.compute + held.idle == pytest.approx(timeline.makespan)
        spans = list(timeline.spans(track))
        llm = sorted((s for s in spans if s.target.startswith("llm") and s.kind != "REDUCE"), key=lambda s: s.start)
        assert all(a.stop <= b.start + 1e-9 for a, b in itertools.pairwise(llm))  # keeps its time
        vision = sorted((s for s in spans if s.target.startswith("vision")), key=lambda s: s.start)
        assert all(a.stop <= b.start + 1e-9 for a, b in itertools.pairwise(vision))
        for s in vision:  # what is not hidden has the rank to itself
            assert not any(max(s.start, o.start) < min(s.stop, o.stop) - 1e-9 for o in llm if s.kind != "REDUCE")
        room = needed = 0.0
        for action in schedule.actions:
            stage = action.target
            if not isinstance(stage, Stage) or action.kind.value == "REDUCE":
                continue
            if not set(schedule.stages.ranks_of(stage)) & set(timeline.tracks[track]):
                continue
            p = costs.parts[stage, action.microbatch]
            each = {"F": p.forward, "B": p.backward_input + p.backward_weight, "I": p.backward_input}
            some = each.get(action.kind.value, p.backward_weight)
            if stage.module == "llm":
                room += sum(s for k, s in some if k == "collective")
            else:
                needed += sum(s for k, s in some if k != "collective")
        shown = sum(s.stop - s.start for s in vision if s.kind != "REDUCE")
        assert timeline.hidden[track] <= room + 1e-9
        assert needed <= timeline.hidden[track] + shown + 1e-9
