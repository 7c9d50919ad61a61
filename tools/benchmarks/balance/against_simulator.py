"""The recurrence by which steps are compared, against the simulator of the same schedule, lane by lane."""

from __future__ import annotations

import numpy as np

from benchmarks.balance.cases import Case
from hetmesh.balance import Assignment, BatchLoads, Slots, assign, pipeline_score
from hetmesh.cost import StageCost, StepCosts
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec, StageGraph, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.schedule import POLICIES
from hetmesh.simulate import simulate


def difference(case: Case, per_microbatch: int = 2) -> float:
    """By how much the two differ at most, relative, for an unbalanced and a balanced batch without deferral."""
    slots = case.slots()
    slots = Slots(slots.lanes, slots.microbatches, stages=slots.stages, overhead=slots.overhead)
    loads = case.loads(slots.lanes[0] * slots.microbatches[0] * per_microbatch, 7)
    out = 0.0
    for policy in ("none", "two_dim"):
        found = assign(loads, slots, policy)
        length = pipeline_score(loads, slots)(found)
        out = max(out, abs(length / simulated(loads, slots, found) - 1))
    return out


def simulated(loads: BatchLoads, slots: Slots, found: Assignment) -> float:
    """The slowest lane's step by `hetmesh.simulate`: 1F1B, every module on ranks of its own, messages free."""
    stages = lane_stages(loads.modules, slots.stages)
    schedule = POLICIES["1f1b"](stages, slots.microbatches[0])
    sums = [bins + fixed for bins, fixed in zip(found.sums(loads.work), slots.overhead, strict=True)]
    lengths = []
    for lane in range(slots.lanes[0]):
        costs = {}
        for stage in stages.stages:
            i = loads.modules.index(stage.module)
            seconds = sums[i][:, lane] / slots.stages[i]
            half = slots.backward[i] / 2
            costs |= {(stage, m): StageCost(s, half * s, half * s) for m, s in enumerate(seconds.tolist())}
        lengths.append(simulate(schedule, StepCosts(costs)).makespan)
    return float(np.max(lengths))


def lane_stages(modules: tuple[str, ...], stages: tuple[int, ...]) -> StageGraph:
    """The stages of one lane."""
    specs, start = [], 0
    for name, count in zip(modules, stages, strict=True):
        layers = tuple(f"layer{i}" for i in range(count))
        specs.append(
            ModuleSpec(
                name,
                MeshSpec.make(range(start, start + count), pp=count),
                layers=layers,
                splits=tuple((layer,) for layer in layers),
                media="image" if name != modules[-1] else None,
                activation=Activation(1),
                features=1,
            )
        )
        start += count
    edges = tuple(BoundarySpec(name, modules[-1], "image") for name in modules[:-1])
    return stage_graph(ModuleGraph(tuple(specs), edges))
