"""Schedules over routes: other numbers of microbatches per module, and rows that go to another number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.errors import ScheduleError
from hetmesh.graph import Activation, BoundarySpec, Edge, ModuleGraph, ModuleSpec, Route, Routes, Stage, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.schedule import (
    POLICIES,
    Action,
    Kind,
    PolicyOptions,
    dependencies,
    one_f_one_b,
    sequential,
)
from hetmesh.schedule.list_schedule import caps_by_distance
from hetmesh.schedule.sequential import one_by_one
from support.random_routes import routes

VISION, LLM = Stage("vision"), Stage("llm")


def module(name, first, pp=1, v=1, **options):
    layers = tuple(f"layer{i}" for i in range(pp * v))
    mesh = MeshSpec.make(range(first, first + pp), pp=pp)
    return ModuleSpec(name, mesh, layers, splits=tuple((x,) for x in layers), activation=Activation(1, True), **options)


def two(**options):
    """Vision on rank 0 feeds the LLM on rank 1."""
    return stage_graph(
        ModuleGraph((module("vision", 0, **options), module("llm", 1)), (BoundarySpec("vision", "llm"),))
    )


def deferred(count):
    """Each microbatch of the LLM takes the rest of the one before, too."""
    pairs = [(m, m) for m in range(count)] + [(m, m + 1) for m in range(count - 1)]
    return Routes.make({"vision": count, "llm": count}, {("vision", "llm"): pairs})


def texts(schedule, stage):
    return " ".join(f"{a.kind}{a.microbatch}" for a in schedule.actions if a.target == stage and a.microbatch >= 0)


@st.composite
def graphs(draw):
    """A projector between, an encoder beside, and an encoder that feeds two modules; each on one or two ranks."""
    depth = st.sampled_from([(1, 1), (2, 1), (2, 2)])
    edges = draw(
        st.sampled_from(
            [
                [("vision", "projector"), ("projector", "llm")],
                [("vision", "projector"), ("projector", "llm"), ("audio", "llm")],
                [("vision", "projector"), ("vision", "audio"), ("projector", "llm"), ("audio", "llm")],
                [("vision", "audio"), ("vision", "llm"), ("audio", "llm")],
            ]
        )
    )
    names = list(dict.fromkeys(name for edge in edges for name in edge if name != "llm"))
    modules = [
        module(name, draw(st.sampled_from([0, 2, 4])), *draw(depth), trainable=draw(st.booleans())) for name in names
    ]
    llm = module("llm", draw(st.sampled_from([0, 6])), *draw(depth))
    return stage_graph(ModuleGraph((*modules, llm), tuple(BoundarySpec(*edge) for edge in edges)))


@given(graphs())
def test_stages_wait_for_the_same_rank_where_they_share_any(stages):
    classes = stages.rank_classes()
    apart = {stage: [ranks[0] for ranks, held in classes if i in held] for i, stage in enumerate(stages.stages)}
    for stage in stages.stages:
        ranks = set(stages.ranks_of(stage))
        assert set(apart[stage]) <= ranks
        for other in stages.stages:
            assert set(apart[stage]).isdisjoint(apart[other]) == ranks.isdisjoint(stages.ranks_of(other))


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), stages=graphs(), policy=st.sampled_from(sorted(POLICIES)), training=st.booleans())
def test_any_routes_have_an_order_under_every_policy(data, stages, policy, training):
    given_routes = data.draw(routes(stages))
    window = data.draw(st.sampled_from([None, 1, 2]))
    schedule = POLICIES[policy](stages, given_routes, training, PolicyOptions(window=window))  # validated
    assert schedule.routes == given_routes
    counts = {stage: texts(schedule, stage).split() for stage in stages.stages}
    for stage, actions in counts.items():
        number = given_routes.count(stage.module)
        assert [a for a in actions if a[0] == "F"] == [f"F{m}" for m in range(number)]
        assert sum(a[0] in "BI" for a in actions) == number * (training and stage in stages.backward_stages)


def test_deferral_is_one_more_warm_up_forward_and_a_backward_one_slot_late():
    plain, late = one_f_one_b(two(), 6), one_f_one_b(two(), deferred(6))
    assert texts(plain, VISION).startswith("F0 F1 B0 F2 B1")
    assert texts(late, VISION).startswith("F0 F1 F2 B0 F3 B1")
    assert texts(late, LLM) == texts(plain, LLM)
    assert (plain.in_flight[VISION], late.in_flight[VISION]) == (2, 3)
    order = list(map(str, late.actions))
    assert order.index("vision.0 B2") > order.index("llm.0->vision.0 RECV3>2") > order.index("llm.0 B3")


def test_a_backward_split_into_what_is_kept_and_what_is_deferred_is_twice_as_many_microbatches():
    """Then nothing waits for a whole microbatch: each half goes backward when its own consumer has."""
    pairs = [(2 * m, m) for m in range(4)] + [(2 * m + 1, m + 1) for m in range(3)] + [(7, 3)]
    routes, stages = Routes.make({"vision": 8, "llm": 4}, {("vision", "llm"): pairs}), two()
    schedule = one_f_one_b(stages, routes)
    assert schedule.in_flight[VISION] == 5
    for half, consumer in ((2, 1), (3, 2)):
        needs = {str(a) for a in dependencies(Action(Kind.BACKWARD, VISION, half), stages, routes)}
        assert needs == {f"vision.0 F{half}", f"llm.0->vision.0 RECV{consumer}>{half}"}


@pytest.mark.parametrize(
    ("counts", "pairs", "held"),
    [
        ((8, 4), [(m, m // 2) for m in range(8)], 4),  # both of one microbatch of the LLM, both of the next
        ((2, 4), [(m // 2, m) for m in range(4)], 2),  # a microbatch of the encoder lasts for two
        ((4, 4), [(m, 3 - m) for m in range(4)], 4),  # the first of the LLM wants the last
        ((3, 3), [(0, 0), (1, 1), (2, 2), (0, 2)], 3),  # the first is wanted until the end
        ((3, 1), [], 1),  # nobody has rows
    ],
)
def test_a_stage_may_hold_what_its_consumers_need(counts, pairs, held):
    stages = two()
    schedule = one_f_one_b(
        stages, Routes.make(dict(zip(("vision", "llm"), counts, strict=True)), {("vision", "llm"): pairs})
    )
    assert schedule.in_flight == {VISION: held, LLM: 1}
    assert schedule.peaks_in_flight()[VISION] == held


def test_backwards_come_as_their_last_consumer_is_over():
    pairs = [(m, 3 - m) for m in range(4)]
    routes = Routes.make({"vision": 4, "llm": 4}, {("vision", "llm"): pairs})
    assert texts(sequential(two(), routes), VISION) == "F0 F1 F2 F3 B3 B2 B1 B0"


def test_a_frozen_encoder_lets_go_of_what_all_its_consumers_have_read():
    stages, routes = two(trainable=False), deferred(5)
    assert sequential(stages, routes).peaks_in_flight()[VISION] == 2
    assert "B" not in texts(one_f_one_b(stages, routes), VISION)


def test_a_stage_holds_what_its_order_needs():
    """All microbatches go through the first chunk of a rank before the next one, which holds one at a time."""
    modules = module("vision", 0, v=2), module("llm", 1)
    stages = stage_graph(ModuleGraph(modules, (BoundarySpec("vision", "llm"),)))
    routes = Routes.make({"vision": 3, "llm": 1}, {("vision", "llm"): [(2, 0)]})
    assert caps_by_distance(stages, routes, one_by_one(stages, routes))[VISION] == 3


def test_actions_name_both_microbatches_where_they_differ():
    edge = Edge(VISION, LLM)
    assert str(Action.along(Kind.SEND, Route(edge, 1, 2))) == "vision.0->llm.0 SEND1>2"
    assert str(Action.along(Kind.RECV, Route(edge, 1, 2).reversed)) == "llm.0->vision.0 RECV2>1"
    assert Action.along(Kind.SEND, Route(edge, 2, 2)) == Action(Kind.SEND, edge, 2)
    assert Action(Kind.SEND, edge, 2).route == (edge, 2, 2)


def test_equal_numbers_are_one_value_however_they_are_given():
    stages = two()
    explicit = Routes.make({"vision": 3, "llm": 3}, {("vision", "llm"): [(2, 2), (0, 0), (1, 1)]})
    assert explicit == Routes.of(stages, 3)
    assert one_f_one_b(stages, explicit).actions == one_f_one_b(stages, 3).actions


def test_routes_that_cannot_be_are_refused():
    with pytest.raises(ScheduleError, match=r"vision->llm: there is no route 2>0; microbatches are 2 and 3"):
        Routes.make({"vision": 2, "llm": 3}, {("vision", "llm"): [(2, 0)]})
    with pytest.raises(ScheduleError, match="2 microbatches cannot feed 3 number by number"):
        sequential(two(), Routes.make({"vision": 2, "llm": 3}))
    with pytest.raises(ScheduleError, match="routes are of modules"):
        sequential(two(), Routes.make({"vision": 2}))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_frozen_encoder_runs_ahead_of_a_trained_projector_in_order_and_no_further_than_the_pipeline_is_deep(depth):
    """Megatron-LM's test_mimo_encoder_prefetch.py: the projector has its gradients, the encoder none."""
    chain = (module("vision", 0, trainable=False), module("projector", 1), module("llm", 2, pp=depth))
    stages = stage_graph(ModuleGraph(chain, (BoundarySpec("vision", "projector"), BoundarySpec("projector", "llm"))))
    schedule = one_f_one_b(stages, 8)
    assert texts(schedule, VISION) == " ".join(f"F{m}" for m in range(8))
    assert texts(schedule, Stage("projector")).count("B") == 8
    forwards = [action.target for action in schedule.actions if action.kind is Kind.FORWARD]
    last, ahead = Stage("llm", depth - 1), []
    for i, stage in enumerate(forwards):
        if stage == last:
            done = forwards[:i]
            ahead.append(done.count(VISION) - done.count(last))
    assert 1 < max(ahead) <= depth + 1
