"""The recurrence of a 1F1B step says what the simulator says of the schedule."""

import numpy as np
import pytest

from hetmesh.balance import BatchLoads, Slots, assign, pipeline_score
from hetmesh.balance.step_lengths import step_lengths
from hetmesh.cost import StageCost, StepCosts
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec, Routes, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.schedule import POLICIES
from hetmesh.simulate import simulate


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
