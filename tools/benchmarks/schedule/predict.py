"""From what stages take by themselves at other shapes to the StepCosts of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.schedule.stages import Measured, own_work
from hetmesh.balance import BatchPlan, edge_layouts
from hetmesh.cost import Observation, Profile, StageCost, StepCosts, TransferCost, fit
from hetmesh.cost.fitted import PARTS, non_negative_least_squares
from hetmesh.graph import Route, Stage
from hetmesh.layout import plan_transfer
from hetmesh.schedule import Schedule


def step_costs(measured: Sequence[Measured], plan: BatchPlan, schedule: Schedule) -> StepCosts:
    """Of the step of `plan`, from what each rank measured at other shapes."""
    stages, profiles = schedule.stages, [_profile(each) for each in measured]
    costs = {
        (stage, m): max(
            (_cost(profiles[rank], plan, schedule, stage, m, rank) for rank in stages.ranks_of(stage)),
            key=lambda cost: cost.forward + cost.backward,
        )
        for stage in stages.stages
        for m in range(schedule.routes.count(stage.module))
    }
    return with_links(StepCosts(costs), measured, plan, schedule)


def with_links(costs: StepCosts, measured: Sequence[Measured], plan: BatchPlan, schedule: Schedule) -> StepCosts:
    """`costs` with the measured seconds of transfers, reductions and of the runtime itself, without the optimizer."""
    reduce = {
        stage: max(statistics.median(each.reductions[stage]) for each in measured if stage in each.reductions)
        for stage in schedule.stages.trainable_stages
    }
    return replace(
        costs,
        transfers=_transfers(measured, plan, schedule),
        reduce=reduce,
        optimizer={},
        action_overhead=statistics.mean(statistics.median(each.overheads) for each in measured),
    )


def _profile(measured: Measured) -> Profile:
    """Each stage's parts as quadratics of its tokens."""
    observations = [
        Observation(str(stage), part, rows, pairs, statistics.median(seconds))
        for (stage, part, rows, pairs), seconds in measured.stages.items()
    ]
    found = {(o.kind, o.part) for o in observations}
    none = [Observation(kind, part, 1, 1, 0.0) for kind in {o.kind for o in observations} for part in PARTS]
    return fit([*observations, *(o for o in none if (o.kind, o.part) not in found)])


def _cost(profile: Profile, plan: BatchPlan, schedule: Schedule, stage: Stage, m: int, rank: int) -> StageCost:
    work = own_work(plan, stage.module, m, rank)
    forward, own, weight, whole = (profile.layers[str(stage)][part].at(work.rows, work.pairs) for part in PARTS)
    # A backward in one piece counts to either part.
    return StageCost(forward, own, weight) if stage in schedule.split else StageCost(forward, 0.0, whole)


def _transfers(measured: Sequence[Measured], plan: BatchPlan, schedule: Schedule) -> dict[Route, TransferCost]:
    """Latency and bandwidth, fitted to messages, over the bytes of every route. float32 only."""
    pairs = [(size, statistics.median(seconds)) for each in measured for size, seconds in each.transfers.items()]
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    features = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    latency, per_byte = non_negative_least_squares(features, np.ones(len(seconds)))
    costs = {}
    for edge in schedule.stages.edges:
        for route in schedule.routes.along(edge):
            forward = plan_transfer(*edge_layouts(plan, *route))
            for each, way in ((route, forward), (route.reversed, forward.transpose())):
                received = max(way.bytes_received(rank, 4) for rank in way.dst.mesh.ranks)
                if received:
                    costs[each] = TransferCost(latency + per_byte * received, received)
    return costs
