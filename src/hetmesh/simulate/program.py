"""A schedule and its costs as columns, what the engine walks over: a million actions in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetmesh.cost.step_costs import StepCosts, TransferCost
from hetmesh.errors import GraphError
from hetmesh.graph import Edge, Stage
from hetmesh.schedule import Action, Kind, Schedule
from hetmesh.simulate.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    REDUCE,
    TRANSFER,
    rank_classes,
    target_names,
)

RECEIVE = 8  # not a kind of span: it takes no time of its own
FREE = TransferCost()
_FORWARD, _BACKWARD, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT  # an enum's attributes are slow
_SEND, _REDUCE = Kind.SEND, Kind.REDUCE


@dataclass(frozen=True, eq=False)
class Program:
    """Actions as columns of equal length, in the schedule's order, and tables by stage, edge and track.

    Attributes:
        kinds: indices into `timeline.KINDS`, or RECEIVE.
        targets: index of the stage, or of the edge (forward edges, then reversed ones).
        microbatches: of each action; of a transfer, that of its source.
        to: of a transfer, the microbatch of its destination; of other actions, their own.
        routes: of a transfer and of its RECEIVE, the number of its route; -1 otherwise.
        seconds: what the action takes, the runtime's own overhead included.
        collectives: how much of it are collectives inside layers.
        bytes: FORWARD and the first part of a backward: activations; SEND: what arrives.
        tracks: the ranks of each track.
        held: per track, the stages of its ranks.
        stage_tracks: per stage, its tracks.
        sources, destinations: per edge, a stage.
        gather: per stage, seconds.
        optimizer, static_bytes: per track, of the rank that has most.
        names: see `Timeline.targets`.
        num_routes: how many transfers there are.
        most: microbatches of the module that has most: a stage and microbatch are cell `stage * most + microbatch`.
    """

    kinds: list[int]
    targets: list[int]
    microbatches: list[int]
    to: list[int]
    routes: list[int]
    seconds: list[float]
    collectives: list[float]
    bytes: list[int]
    tracks: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    stage_tracks: list[tuple[int, ...]]
    sources: list[int]
    destinations: list[int]
    gather: list[float]
    optimizer: list[float]
    static_bytes: list[int]
    names: tuple[str, ...]
    num_routes: int
    most: int


def program(schedule: Schedule, costs: StepCosts) -> Program:
    """The columns of `schedule` under `costs`.

    Raises:
        GraphError: there is no cost for a stage and microbatch.
    """
    stages = schedule.stages
    classes = rank_classes(stages)
    stage_tracks: list[list[int]] = [[] for _ in stages.stages]
    for track, held in enumerate(classes.values()):
        for stage in held:
            stage_tracks[stage].append(track)
    edges = (*stages.edges, *(edge.reversed for edge in stages.edges))
    index = {stage: i for i, stage in enumerate(stages.stages)}
    training = schedule.training
    look_up = _Costs(schedule, costs, index, {edge: i for i, edge in enumerate(edges)})
    entries = [look_up.entry(action) for action in schedule.actions]
    columns: list[list[Any]] = [list(column) for column in zip(*entries, strict=True)] or [[] for _ in range(8)]
    kinds, targets, microbatches, to, routes, seconds, collectives, size = columns
    return Program(
        kinds,
        targets,
        microbatches,
        to,
        routes,
        seconds,
        collectives,
        size,
        tracks=tuple(classes),
        held=tuple(classes.values()),
        stage_tracks=[tuple(tracks) for tracks in stage_tracks],
        sources=[index[edge.source] for edge in edges],
        destinations=[index[edge.destination] for edge in edges],
        gather=[costs.gather.get(stage, 0.0) for stage in stages.stages],
        optimizer=[
            max((costs.optimizer.get(rank, 0.0) for rank in ranks), default=0.0) * training for ranks in classes
        ],
        static_bytes=[max(costs.static_bytes.get(rank, 0) for rank in ranks) for ranks in classes],
        names=target_names(stages),
        num_routes=len(look_up.routes),
        most=schedule.routes.most,
    )


Entry = tuple[int, int, int, int, int, float, float, int]
"""One action: kind, target, microbatch, to, route, seconds, collectives, bytes."""


class _Costs:
    """Looks actions up in tables; made once per program."""

    def __init__(self, schedule: Schedule, costs: StepCosts, stages: dict[Stage, int], edges: dict[Edge, int]) -> None:
        self.stages, self.edges, self.costs, self.recomputed = stages, edges, costs, schedule.recompute
        # By number of the edge: hashing an edge costs more than all else that an entry takes.
        self.routes: dict[tuple[int, int, int], int] = {}
        self.transfers = {
            (edges[edge], m, to): cost for (edge, m, to), cost in costs.transfers.items() if edge in edges
        }

    def entry(self, action: Action) -> Entry:
        kind, target, m = action.kind, action.target, action.microbatch
        if isinstance(target, Edge):
            edge, to = self.edges[target], m if action.to is None else action.to
            route = (edge, m, to)
            number = self.routes.setdefault(route, len(self.routes))
            if kind is not _SEND:
                return RECEIVE, edge, m, to, number, 0.0, 0.0, 0
            transfer = self.transfers.get(route, FREE)
            return TRANSFER, edge, m, to, number, transfer.seconds, 0.0, transfer.bytes
        stage, overhead = self.stages[target], self.costs.action_overhead
        if kind is _REDUCE:
            return REDUCE, stage, m, m, -1, self.costs.reduce.get(target, 0.0) + overhead, 0.0, 0
        cost = self.costs.stages.get((target, m))
        if cost is None:
            raise GraphError(f"costs: none for {action}")
        if kind is _FORWARD:
            return FORWARD, stage, m, m, -1, cost.forward + overhead, cost.collectives_forward, cost.activation_bytes
        if kind is _WEIGHT:
            return BACKWARD_WEIGHT, stage, m, m, -1, cost.backward_weight + overhead, 0.0, cost.activation_bytes
        # all collectives of a backward are in its first part
        seconds, collectives = cost.backward_input + overhead, cost.collectives_backward
        if target in self.recomputed:
            seconds, collectives = seconds + cost.forward, collectives + cost.collectives_forward
        if kind is _BACKWARD:
            return BACKWARD, stage, m, m, -1, seconds + cost.backward_weight, collectives, cost.activation_bytes
        return BACKWARD_INPUT, stage, m, m, -1, seconds, collectives, cost.activation_bytes
