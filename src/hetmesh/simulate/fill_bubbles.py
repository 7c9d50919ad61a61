"""Bubble fill by what a step costs: the durations and the score that the policy asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetmesh.balance import BatchPlan
from hetmesh.cost import Lanes, Rates, StageCost, StepCosts, Work, module_times
from hetmesh.graph import Route, Routes, Stage
from hetmesh.schedule import Action, Kind, PolicyOptions, Schedule, bubble_fill
from hetmesh.simulate import StepModel, simulate
from hetmesh.simulate.lanes import group_ranks


def fill_bubbles(
    model: StepModel, plan: BatchPlan, training: bool, options: PolicyOptions, *, beside: Collection[str] = ()
) -> Schedule:
    """`bubble_fill` for the step of `plan`: gaps by the seconds of `model`, decided by its simulated makespan.

    A pure function: equal on every rank whose model has the same costs, but for the last bits of matrix products, which
    processors round differently: costs are brought onto a coarse grid (`on_grid`). That ranks of a node slow each other
    down is left out; which of two orders is the shorter hardly depends on it.

    Raises:
        ScheduleError: see `bubble_fill`.
        HetmeshError: see `StepModel.costs`.
    """
    costs = model.costs(plan, Schedule(model.stages, plan.routes, (), training), parts=bool(beside))
    return _by_costs(costs, model, plan.routes, training, options, beside)


def _by_costs(
    costs: StepCosts, model: StepModel, routes: Routes, training: bool, options: PolicyOptions, beside: Collection[str]
) -> Schedule:
    costs = replace(on_grid(costs), busy_slowdown=())
    unit = _unit(costs) or 1.0  # parts of actions lie on no grid, so sums of them are brought onto it

    def score(schedule: Schedule) -> float:
        return unit * round(simulate(schedule, costs, beside=beside).makespan / unit)

    durations, on_sets = _durations(costs.stages, costs.action_overhead), _on_sets(costs)
    seconds: dict[str, Any] = {"durations": durations, "lanes": costs.lanes, "on_sets": on_sets}
    return bubble_fill(model.stages, routes, training, options, score=score, **seconds)


_GRID = 2.0**-16  # of the longest action
_SECONDS = ("forward", "backward_input", "backward_weight", "collectives_forward", "collectives_backward")


def _unit(costs: StepCosts) -> float:
    longest = max((max(cost.forward, cost.backward) for cost in costs.stages.values()), default=0.0)
    return 2.0 ** math.frexp(longest)[1] * _GRID if longest else 0.0


def on_grid(costs: StepCosts) -> StepCosts:
    """All seconds as multiples of one power of two, so that sums of them are exact: which of two schedules is the
    shorter does not depend on how a processor rounds."""
    unit = _unit(costs)
    if not unit:
        return costs

    def rounded(seconds: float) -> float:
        return round(seconds / unit) * unit

    def each(cost: StageCost) -> StageCost:
        seconds: dict[str, Any] = {name: rounded(getattr(cost, name)) for name in _SECONDS}
        return replace(cost, **seconds)

    lanes = costs.lanes
    if lanes is not None:
        lanes = replace(lanes, costs={key: tuple(map(each, some)) for key, some in lanes.costs.items()})
    return replace(
        costs,
        lanes=lanes,
        stages={key: each(cost) for key, cost in costs.stages.items()},
        transfers={key: replace(cost, seconds=rounded(cost.seconds)) for key, cost in costs.transfers.items()},
        gather={stage: rounded(seconds) for stage, seconds in costs.gather.items()},
        reduce={stage: rounded(seconds) for stage, seconds in costs.reduce.items()},
        optimizer={rank: rounded(seconds) for rank, seconds in costs.optimizer.items()},
        action_overhead=rounded(costs.action_overhead),
    )


def fill_typical_beside(
    model: StepModel, routes: Routes, options: PolicyOptions, work: Callable[[str], Work], beside: Collection[str]
) -> Schedule:
    """`fill_bubbles` for microbatches that are all alike: `work` as in `StepModel.typical_costs`."""
    costs = replace(model.typical_costs(routes, work), lanes=_lanes(model, routes))
    return _by_costs(costs, model, routes, True, options, beside)


def fill_typical(model: StepModel, routes: Routes, training: bool, options: PolicyOptions, work: Work) -> Schedule:
    """`bubble_fill` for microbatches that are all alike: `work` on each lane of the LLM, and as many rows."""
    graph, costs = model.graph, {}
    for name in graph.order:
        spec = graph[name]
        upstream = any(map(graph.needs_gradient, graph.inputs(name)))
        times = module_times(model.shape(name), work, Rates(1.0), upstream=upstream, tp=spec.mesh.axis_size("tp"))
        times_as_many = routes.count(graph.llm.name) / max(routes.count(name), 1)  # its microbatches hold as much less
        share = times_as_many * graph.llm.num_lanes / (spec.num_lanes * spec.mesh.axis_size("cp"))
        for stage in model.stages.of_module(name):
            own = [times[layer] for layer in spec.stage_layers(stage.index) if layer in times] or [*times.values()]
            costs[stage] = StageCost(
                share * sum(time.forward for time in own),
                share * sum(time.backward_input for time in own),
                share * sum(time.backward_weight for time in own),
            )
    alike = {(stage, m): cost for stage, cost in costs.items() for m in range(routes.count(stage.module))}
    alike = dict(on_grid(StepCosts(alike)).stages)
    lanes = _lanes(model, routes)
    return bubble_fill(model.stages, routes, training, options, durations=_durations(alike, 0.0), lanes=lanes)


def _lanes(model: StepModel, routes: Routes) -> Lanes:
    groups = {stage: group_ranks(model.graph[stage.module], stage.index) for stage in model.stages.stages}
    flows: dict[Route, tuple[tuple[int, int], ...]] = {}
    for edge in model.stages.edges:
        if not edge.internal and groups[edge.source] == groups[edge.destination]:  # both have the same samples
            flows |= dict.fromkeys(routes.along(edge), tuple((i, i) for i in range(len(groups[edge.source]))))
    return Lanes(groups, flows)


def _durations(costs: Mapping[tuple[Stage, int], StageCost], overhead: float) -> Callable[[Action], float]:
    def seconds(action: Action) -> float:
        return _seconds(costs[action.stage, action.microbatch], action.kind) + overhead

    return seconds


def _on_sets(costs: StepCosts) -> Callable[[Action], Sequence[float]] | None:
    """What actions take on each set of ranks, where lanes act apart."""
    if (lanes := costs.lanes) is None:
        return None

    def seconds(action: Action) -> Sequence[float]:
        of_sets = lanes.costs.get((action.stage, action.microbatch), ())
        return tuple(_seconds(cost, action.kind) + costs.action_overhead for cost in of_sets)

    return seconds


def _seconds(cost: StageCost, kind: Kind) -> float:
    if kind is Kind.FORWARD:
        return cost.forward
    if kind is Kind.BACKWARD:
        return cost.backward
    return cost.backward_input if kind is Kind.BACKWARD_INPUT else cost.backward_weight
