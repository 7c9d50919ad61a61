"""Predicted beside measured: sums by module and kind of action, on the mean rank of those that did any."""

from dataclasses import replace

import pytest

from hetmesh.cost import StageCost, StepCosts, TransferCost
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.report.timeline_text import action_table, action_times
from hetmesh.schedule import one_f_one_b
from hetmesh.simulate import simulate


@pytest.fixture
def timelines():
    """An encoder on ranks 0 and 1 before a pipeline on 2 and 3, four microbatches; measured is 10% slower in backwards
    and has no optimizer."""
    vision = ModuleSpec("vision", MeshSpec.make(range(2), dp_replicate=2), ("v",), features=4, media="image")
    llm = ModuleSpec(
        "llm", MeshSpec.make([2, 3], pp=2), ("a", "b"), splits=(("a",), ("b",)), activation=Activation(4, True)
    )
    schedule = one_f_one_b(stage_graph(ModuleGraph((vision, llm), (BoundarySpec("vision", "llm", "image"),))), 4)
    stages = schedule.stages
    sends = {
        route: TransferCost(1e-3, 8)
        for edge in stages.edges
        for one in schedule.routes.along(edge)
        for route in (one, one.reversed)
    }
    costs = StepCosts(
        {(s, m): StageCost(2e-3, 1e-3, 3e-3) for s in stages.stages for m in range(4)},
        sends,
        reduce={stages.stages[0]: 5e-3},
        optimizer=dict.fromkeys(range(4), 7e-3),
    )
    slower = {key: replace(cost, backward_weight=3.4e-3) for key, cost in costs.stages.items()}
    measured = simulate(schedule, replace(costs, stages=slower, optimizer={}))
    return {"predicted": simulate(schedule, costs), "measured": measured}


def test_every_module_and_kind_is_compared(timelines):
    found = {(each.module, each.kind): each for each in action_times(timelines)}
    assert found["llm", "F"].predicted == pytest.approx(4 * 2e-3), "a rank of the pipeline holds one stage"
    assert found["llm", "B"].predicted == pytest.approx(4 * 4e-3)
    assert found["llm", "B"].error == pytest.approx(4 / 4.4 - 1)
    assert found["llm", "B"].measured_count == 4
    assert found["vision", "REDUCE"].error == pytest.approx(0)
    assert found["vision->llm", "SEND"].predicted == pytest.approx(4e-3)
    assert found["llm", "SEND"].measured_count == 4
    optimizer = found["", "OPTIMIZER"]
    assert (optimizer.predicted, optimizer.measured, optimizer.error) == (pytest.approx(7e-3), None, None)


def test_the_table_and_the_values_agree(timelines):
    lines = action_table(timelines).splitlines()
    (backward,) = [line for line in lines if line.startswith("llm backward ")]
    assert backward.split() == ["llm", "backward", "16.00", "17.60", "-9%", "4"]
    assert any(line.split() == ["optimizer", "7.00", "-", "-", "1"] for line in lines)
    assert lines[-1].startswith("step ")
    assert len(action_times(timelines)) == len(lines) - 2
    only = action_table({"measured": timelines["measured"]})
    assert "-9%" not in only
