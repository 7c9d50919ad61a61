"""The seconds of stages from those of their layers, and what 1F1B makes of them. Nothing here runs a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

from hetmesh.cost import LayerTime, StageCost, StepCosts
from hetmesh.graph import ModuleGraph, stage_graph
from hetmesh.schedule import POLICIES
from hetmesh.simulate import simulate

Times = Mapping[str, Mapping[str, LayerTime]]
"""Module -> layer -> seconds of one microbatch."""


def makespan(graph: ModuleGraph, times: Times, microbatches: int, slowdown: tuple[float, ...] = ()) -> float:
    """Of a 1F1B step without the optimizer; messages are free.

    Args:
        slowdown: `Machine.busy_slowdown`.
    """
    stages = stage_graph(graph)
    costs = {}
    for stage in stages.stages:
        layers = graph[stage.module].stage_layers(stage.index)
        each = [astuple(times[stage.module][layer]) for layer in layers]
        total = LayerTime(*map(sum, zip(*each, strict=True)))
        backward = total if stage in stages.backward_stages else LayerTime()
        cost = StageCost(total.forward, backward.backward_input + backward.recompute, backward.backward_weight)
        costs |= {(stage, m): cost for m in range(microbatches)}
    return simulate(POLICIES["1f1b"](stages, microbatches), StepCosts(costs, busy_slowdown=slowdown)).makespan
