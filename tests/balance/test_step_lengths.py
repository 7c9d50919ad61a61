"""What balancers take for the length of a step is what the simulator says of the schedule."""

import numpy as np
import pytest

from hetmesh.balance import BatchLoads, Slots, assign, pipeline_score
from hetmesh.balance.co_located import led_modules
from hetmesh.balance.step_lengths import step_lengths
from hetmesh.cost import Lanes, StageCost, StepCosts
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec, Routes, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.schedule import POLICIES, PolicyOptions
from hetmesh.simulate import simulate
from hetmesh.simulate.lanes import group_ranks
from hetmesh.simulate.replay import StepReplay


def lane_graph(stages, trained):
    """One lane of modules of so many stages on ranks of their own; all feed the last."""
    modules, start = [], 0
    for i, (count, trainable) in enumerate(zip(stages, trained, strict=True)):
        layers = tuple(f"l{j}" for j in range(count))
        modules.append(
            ModuleSpec(
                f"m{i}",
                MeshSpec.make(range(start, start + count), pp=count),
                layers=layers,
                splits=tuple((layer,) for layer in layers),
                activation=Activation(1),
                trainable=trainable,
                media=None if i == len(stages) - 1 else "image",
                features=1,
            )
        )
        start += count
    last = f"m{len(stages) - 1}"
    return ModuleGraph(tuple(modules), tuple(BoundarySpec(m.name, last, "image") for m in modules[:-1]))


def simulated(work, stages, backward, routes=None):
    """`work` `[microbatches, modules]`."""
    graph = stage_graph(lane_graph(stages, [b > 0 for b in backward]))
    names = [f"m{i}" for i in range(len(stages))]
    costs = {}
    for stage in graph.stages:
        i = names.index(stage.module)
        for m, row in enumerate(work):
            forward = float(row[i]) / stages[i]
            costs[stage, m] = StageCost(forward, forward * backward[i] / 2, forward * backward[i] / 2)
    return simulate(POLICIES["1f1b"](graph, routes or len(work)), StepCosts(costs)).makespan


@pytest.mark.parametrize(
    ("stages", "backward"),
    [((4, 4), (2.0, 2.0)), ((1, 3), (2.0, 2.0)), ((3, 1), (2.0, 1.0)), ((2, 1, 2), (2.0, 2.0, 2.0)), ((4,), (2.0,))],
)
@pytest.mark.parametrize("microbatches", [1, 3, 12])
def test_a_step_is_as_long_as_simulated(stages, backward, microbatches):
    work = np.random.default_rng(microbatches).integers(0, 1000, (5, microbatches, len(stages)))
    found = step_lengths(work, stages, backward)
    assert found == pytest.approx([simulated(each, stages, backward) for each in work])


def test_a_frozen_encoder_is_at_most_as_fast_as_simulated():
    """Its forwards run as far ahead as they can; the schedule lets them run as far as their consumer's cap."""
    work = np.random.default_rng(0).integers(1, 1000, (5, 8, 2))
    found = step_lengths(work, (2, 2), (0.0, 2.0))
    for length, each in zip(found, work, strict=True):
        assert length <= simulated(each, (2, 2), (0.0, 2.0)) * (1 + 1e-12)


def test_the_score_is_that_of_the_slowest_lane():
    rng = np.random.default_rng(1)
    loads = BatchLoads(("vision", "llm"), rng.integers(1, 1000, (60, 2)))
    slots = Slots((3, 3), (5, 5), stages=(2, 2))
    found = assign(loads, slots, "two_dim")
    vision, llm = found.sums(loads.work)
    lanes = [simulated(np.stack([vision[:, i], llm[:, i]], 1), (2, 2), (2.0, 2.0)) for i in range(3)]
    assert pipeline_score(loads, slots)(found) == pytest.approx(max(lanes))


def test_deferral_makes_an_encoder_wait_for_two_backwards():
    even = np.full((3, 8, 2), 12)
    late = np.zeros((3, 8), bool)
    late[1, 6] = late[2, 0] = True
    plain = step_lengths(even, (1, 1), (2.0, 2.0))
    assert plain.tolist() == [12 * (8 + 1) * 3] * 3  # K + 1 microbatches of forward and backward
    # Early it costs what the one more forward takes, which warms the encoder up and leaves a backward more for the end;
    # at the end nothing hides that two backwards wait for the last one of the LLM.
    assert (step_lengths(even, (1, 1), (2.0, 2.0), late=late) - plain).tolist() == [0, 24, 12]


@pytest.mark.parametrize("stages", [(1, 1), (2, 3), (4, 4), (1, 4), (4, 1)])
@pytest.mark.parametrize("policy", ["two_dim", "entrain"])
def test_a_step_with_deferral_is_as_long_as_simulated(stages, policy):
    """The schedule of the routes that an assignment makes, not only the order that the recurrence has in mind."""
    deferred = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        loads = BatchLoads(("m0", "m1"), np.rint(1000 * np.exp(0.8 * rng.standard_normal((36, 2)))).astype(np.int64))
        slots = Slots((1, 1), (12, 12), stages=stages, overhead=(50, 50), deferral=True)
        found = assign(loads, slots, policy)
        deferred += int(found.deferred.sum())
        work = np.stack([bins[:, 0] + 50 for bins in found.sums(loads.work)], 1)
        routes = Routes.make({"m0": 12, "m1": 12}, {("m0", "m1"): map(tuple, found.microbatch.tolist())})
        length = simulated(work, stages, (2.0, 2.0), routes)
        assert pipeline_score(loads, slots)(found) == pytest.approx(length, rel=0.02)
    assert deferred > 3


def placed_graph(vision, llm, stages, trained=True):
    """An encoder and an LLM on meshes: degrees by axis, ranks from the first on; so many stages each."""
    meshes = [MeshSpec.make(range(start, start + size), **axes) for start, size, axes in (vision, llm)]
    modules = []
    for name, mesh, count in zip(("vision", "llm"), meshes, stages, strict=True):
        layers = tuple(f"l{i}" for i in range(count))
        runs = tuple((layer,) for layer in layers)
        cut = {"layers": layers, "splits": runs, "activation": Activation(1)} if count > 1 else {"layers": layers}
        media = "image" if name == "vision" else None
        modules.append(ModuleSpec(name, mesh, **cut, trainable=trained or name == "llm", media=media, features=1))
    return ModuleGraph(tuple(modules), (BoundarySpec("vision", "llm", "image"),))


LANES = {"dp_replicate": 4}
PLACED = {
    "same ranks": ((0, 2, {"dp_replicate": 2}), (0, 2, {"tp": 2}), (1, 1)),
    "one mesh": ((0, 2, {"tp": 2}), (0, 2, {"tp": 2}), (1, 1)),
    "disjoint": ((0, 2, {"pp": 2}), (2, 2, {"pp": 2}), (2, 2)),
    "lanes along a pipeline": ((0, 4, LANES), (0, 4, {"pp": 4}), (1, 4)),
    "tensor parallel along a pipeline": ((0, 4, {"tp": 4}), (0, 4, {"pp": 4}), (1, 4)),
    "slices along a pipeline": ((0, 4, LANES), (0, 4, {"pp": 4}), (3, 4)),
    "a pipeline along one": ((0, 2, {"pp": 2}), (0, 2, {"pp": 2}), (2, 2)),
    "turns": ((0, 4, LANES), (0, 4, {"dp_replicate": 2, "pp": 2}), (1, 4)),
    "overlapping": ((0, 3, {"dp_replicate": 3}), (2, 2, {"pp": 2}), (1, 2)),
}
FILLED = {f"bubble_fill, {inner}": PolicyOptions(inner=inner) for inner in ("1f1b", "interleaved", "zero_bubble")}
SCHEDULES = dict.fromkeys(("sequential", "1f1b", "interleaved", "zero_bubble", "three_phase"), PolicyOptions())
SCHEDULES |= FILLED | {"three_phase, again": PolicyOptions(window=2, recompute=True)}


@pytest.mark.parametrize(
    ("placed", "schedule", "trained"),
    [
        (placed, schedule, trained)
        for placed in PLACED
        for schedule in SCHEDULES
        for trained in ((True, False) if schedule in ("1f1b", "zero_bubble") else (True,))
        if schedule not in FILLED or placed not in ("disjoint", "overlapping")  # there is nothing to fill
    ],
)
def test_under_any_placement_and_schedule_a_step_is_as_long_as_simulated(placed, schedule, trained):
    vision, llm, stages = PLACED[placed]
    graph = placed_graph(vision, llm, stages, trained)
    policy, options = schedule.partition(",")[0], SCHEDULES[schedule]
    backward = (2.0 * trained, 2.0)
    led = led_modules(graph)  # what goes along with another module counts as its work
    work = np.random.default_rng(0).integers(1, 1000, (3, 5, len(led)))
    found = StepReplay(graph, policy, options)(work, backward[-len(led) :])
    parts = stage_graph(graph)
    made = POLICIES[policy](parts, 5, True, options)
    for length, rows in zip(found, work, strict=True):
        costs = {}
        for stage in parts.stages:
            i = ("vision", "llm").index(stage.module)
            for m, row in enumerate(rows):
                forward = float(row[led.index(stage.module)]) / stages[i] if stage.module in led else 0.0
                costs[stage, m] = StageCost(forward, forward * backward[i] / 2, forward * backward[i] / 2)
        lanes = Lanes({stage: group_ranks(graph[stage.module], stage.index) for stage in parts.stages})
        assert length == pytest.approx(simulate(made, StepCosts(costs, lanes=lanes)).makespan)


def test_deferral_under_a_placement_is_as_long_as_simulated():
    """The rows that come late bind the encoder to the LLM's next microbatch."""
    graph = placed_graph(*PLACED["overlapping"])
    parts, replay = stage_graph(graph), StepReplay(graph, "1f1b", PolicyOptions())
    late = np.array([True, False, True, False, True, False])
    pairs = [(m, m) for m in range(6)] + [(m, m + 1) for m in (0, 2, 4)]
    made = POLICIES["1f1b"](parts, Routes.make({"vision": 6, "llm": 6}, {("vision", "llm"): pairs}))
    lanes = Lanes({stage: group_ranks(graph[stage.module], stage.index) for stage in parts.stages})
    work = np.random.default_rng(0).integers(1, 1000, (4, 6, 2))
    found = replay(work, (2.0, 2.0), late)
    for length, rows in zip(found, work.astype(float), strict=True):
        each = {
            (s, m): row[int(s.module == "llm")] / graph[s.module].num_stages
            for s in parts.stages
            for m, row in enumerate(rows)
        }
        costs = {place: StageCost(seconds, seconds, seconds) for place, seconds in each.items()}
        assert length == pytest.approx(simulate(made, StepCosts(costs, lanes=lanes)).makespan)
    assert (found > replay(work, (2.0, 2.0))).any()


def test_where_ranks_are_shared_the_score_adds_up_the_times_of_modules():
    """On one rank everything takes its turn, so no order of microbatches is better; apart, the larger time hides the
    smaller one, and balancing both modules pays."""
    rng = np.random.default_rng(1)
    loads = BatchLoads(("vision", "llm"), rng.integers(1, 1000, (24, 2)))
    replay = StepReplay(placed_graph(*PLACED["same ranks"]), "1f1b", PolicyOptions())
    shared = Slots((1, 1), (6, 6), lengths=replay)
    lengths = {policy: pipeline_score(loads, shared)(assign(loads, shared, policy)) for policy in ("none", "two_dim")}
    assert lengths == dict.fromkeys(("none", "two_dim"), 3.0 * loads.work.sum())
    apart, own = Slots((1, 1), (6, 6)), assign(loads, shared)
    assert own.policy == "auto: two_dim"
    assert pipeline_score(loads, apart)(assign(loads, apart)) < pipeline_score(loads, apart)(
        assign(loads, apart, "none")
    )
