"""Bubble fill by what a step costs: what the policy is told, the same whatever the last bits that a processor rounds
to."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hetmesh.balance import plan_batch
from hetmesh.cost import LayerShape, ModuleShape, StageCost, StepCosts, TransferCost, WeightShape, Work, load_machine
from hetmesh.graph import (
    Activation,
    BoundarySpec,
    Edge,
    MediaItem,
    ModuleGraph,
    ModuleSpec,
    Route,
    Routes,
    SampleMeta,
    Stage,
)
from hetmesh.layout import MeshSpec
from hetmesh.schedule import Action, Kind, PolicyOptions
from hetmesh.simulate import StepModel, simulate
from hetmesh.simulate import fill_bubbles as module
from hetmesh.simulate.fill_bubbles import fill_bubbles, fill_typical, on_grid


def drawn(seed, noise=0.0):
    rng, last_bits = random.Random(seed), random.Random(seed + 1)

    def seconds():
        return rng.uniform(1e-4, 1e-2) * (1 + noise * last_bits.uniform(-1, 1))

    a, b = Stage("a", 0), Stage("b", 0)
    stages = {(s, m): StageCost(seconds(), seconds(), seconds(), seconds() / 8) for s in (a, b) for m in range(9)}
    route = Route(Edge(a, b), 0, 0)
    return StepCosts(stages, {route: TransferCost(seconds(), 5)}, {a: seconds()}, {b: seconds()}, {0: seconds()})


def test_last_bits_do_not_matter_and_sums_are_exact():
    for seed in range(50):
        costs = on_grid(drawn(seed))
        assert costs == on_grid(drawn(seed, 1e-14))
        forwards = [cost.forward for cost in costs.stages.values()]
        assert sum(forwards) == sum(reversed(forwards))
        before = drawn(seed)
        for key, cost in costs.stages.items():
            assert abs(cost.forward - before.stages[key].forward) <= 2**-16 * 2e-2  # of the longest backward
            assert replace(cost, forward=0.0).backward_input > 0


def test_costs_of_nothing_stay():
    nothing = StepCosts({(Stage("a", 0), 0): StageCost(0.0)})
    assert on_grid(nothing) == nothing


def model(ranks, **axes):
    """An encoder before an LLM of two stages and two lanes on four ranks, which slow each other down."""
    layers = ("a", "b")
    options = {"features": 64, "activation": Activation(64, True)}
    encoder = ModuleSpec("vision", MeshSpec.make(ranks, **axes), layers, "image", splits=(("a",), ("b",)), **options)
    mesh = MeshSpec.make(range(4), pp=2, dp_replicate=2)
    llm = ModuleSpec("llm", mesh, layers, splits=(("a",), ("b",)), activation=Activation(128, True))
    graph = ModuleGraph((encoder, llm), (BoundarySpec("vision", "llm", "image"),))
    shapes = {
        name: ModuleShape(name, tuple(LayerShape(x, (WeightShape(f"{x}.w", (n, n), 1),)) for x in layers))
        for name, n in (("vision", 641), ("llm", 1281))
    }
    machine = replace(load_machine("h100"), peak_flops={"float32": 1e12}, busy_slowdown=(1.0, 2.0, 3.0, 4.0))
    return StepModel(graph, shapes, replace(machine, ranks_per_node=4))


@pytest.fixture
def told(monkeypatch):
    """What the policy was told last."""
    seen = SimpleNamespace()
    policy = module.bubble_fill

    def asked(*args, **kwargs):
        vars(seen).update({"score": None, "lanes": None, **kwargs})
        return policy(*args, **kwargs)

    monkeypatch.setattr(module, "bubble_fill", asked)
    return seen


def compute(schedule):
    return [a for a in schedule.actions if isinstance(a.target, Stage) and a.kind is not Kind.REDUCE]


def grid(longest):
    return 2.0 ** (math.frexp(longest)[1] - 16)


def test_a_step_is_filled_by_its_own_costs_on_a_grid(told):
    own = model(range(4), dp_replicate=4)
    samples = [
        SampleMeta(f"s{i}", 90 + 61 * i, (MediaItem("image", (3, 1, 1), 0, 16 + 23 * i),), ((60 + i, 80),))
        for i in range(8)
    ]
    samples = [replace(s, rows={"vision": s.media[0].rows}) for s in samples]
    plan = plan_batch(own.graph, samples, 1)
    schedule = fill_bubbles(own, plan, True, PolicyOptions())
    costs = own.costs(plan, schedule)
    longest = max(max(cost.forward, cost.backward) for cost in costs.stages.values())
    unit = grid(longest)
    for action in compute(schedule):
        cost, seconds = costs.stages[action.target, action.microbatch], told.durations(action)
        assert seconds == pytest.approx(cost.forward if action.kind is Kind.FORWARD else cost.backward, abs=2 * unit)
        assert (seconds / unit).is_integer()
        parts = [told.durations(replace(action, kind=kind)) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
        assert parts == pytest.approx([cost.backward_input, cost.backward_weight], abs=2 * unit)
    assert told.lanes.groups == costs.lanes.groups
    assert told.lanes.costs.keys() == costs.lanes.costs.keys() != set()
    assert all((c.forward / unit).is_integer() for some in told.lanes.costs.values() for c in some)
    undisturbed, disturbed = (simulate(schedule, replace(costs, busy_slowdown=each)) for each in ((), (1.0, 2.0)))
    assert told.score(schedule) == pytest.approx(undisturbed.makespan, abs=200 * unit)
    assert undisturbed.makespan < 0.9 * disturbed.makespan


def test_typical_microbatches_cost_by_how_many_there_are_and_on_how_many_lanes(told):
    work = Work(64, 64**2, 30)
    forward = {stage: Action(Kind.FORWARD, Stage(stage), 0) for stage in ("vision", "llm")}

    def seconds(own, routes):
        schedule = fill_typical(own, routes, True, PolicyOptions(), work)
        assert schedule.routes == routes
        each = [told.durations(action) for action in compute(schedule)]
        assert all((seconds / grid(max(each))).is_integer() for seconds in each)
        return told.durations(forward["vision"]) / told.durations(forward["llm"])

    four, two = model(range(4), dp_replicate=4), model(range(2), dp_replicate=2)
    plain = Routes.of(two.stages, 4)
    half = Routes.make({"vision": 2, "llm": 4}, {("vision", "llm"): [(0, 0), (0, 1), (1, 2), (1, 3)]})
    assert seconds(two, plain) == pytest.approx((641 / 1281) ** 2, rel=1e-3)
    assert set(told.lanes.flows.values()) == {((0, 0), (1, 1))}  # lanes on the same ranks have the same samples
    assert seconds(two, half) == pytest.approx(2 * (641 / 1281) ** 2, rel=1e-3)
    assert seconds(four, plain) == pytest.approx((641 / 1281) ** 2 / 2, rel=1e-3)
    assert told.lanes.groups[Stage("vision")] == ((0,), (1,), (2,), (3,))
    assert told.lanes.flows == {}
    behind = model([2, 3, 0, 1], pp=2, dp_replicate=2)
    seconds(behind, Routes.of(behind.stages, 4))
    assert set(told.lanes.flows.values()) == {((0, 0), (1, 1))}
    before = model(range(4), pp=2, dp_replicate=2)
    seconds(before, Routes.of(before.stages, 4))
    assert told.lanes.flows == {}  # its last stage is on other ranks than the first of the LLM
