"""A schedule and its costs as columns, a million actions in seconds, and one pass over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetmesh.cost.step_costs import StageCost, StepCosts, TransferCost
from hetmesh.errors import GraphError
from hetmesh.graph import Edge, Route, Stage
from hetmesh.schedule import Action, Kind, Schedule
from hetmesh.simulate.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GATHER,
    OPTIMIZER,
    REDUCE,
    TRANSFER,
    target_names,
)

RECEIVE = 8  # not a kind of span: it takes no time of its own
NO_COST = TransferCost()
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
        each: per action, the seconds, and the collectives in them, of every set, where they differ; None otherwise.
        tracks: the ranks of each track.
        held: per track, the stages of its ranks.
        stage_tracks: per stage, its tracks.
        groups: per stage, its tracks in the sets that start together (`Lanes.groups`).
        flows: per route, for every set of its destination the tracks that send to it; none: it gets nothing.
        sources, destinations: per edge, a stage.
        gather: per stage, seconds.
        optimizer, static_bytes, update_bytes: per track, of the rank that has most.
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
    each: list[tuple[tuple[float, float], ...] | None]
    tracks: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    stage_tracks: list[tuple[int, ...]]
    groups: list[tuple[tuple[int, ...], ...]]
    flows: list[tuple[tuple[int, ...], ...]]
    sources: list[int]
    destinations: list[int]
    gather: list[float]
    optimizer: list[float]
    static_bytes: list[int]
    update_bytes: list[int]
    names: tuple[str, ...]
    num_routes: int
    most: int


_COLUMNS = ("kinds", "targets", "microbatches", "to", "routes", "seconds", "collectives", "bytes", "each")


def program(schedule: Schedule, costs: StepCosts) -> Program:
    """The columns of `schedule` under `costs`. Raises GraphError: there is no cost for a stage and microbatch."""
    stages = schedule.stages
    apart = costs.lanes.groups if costs.lanes else {}
    classes = stages.rank_classes(apart)
    track_of = {rank: track for track, (ranks, _) in enumerate(classes) for rank in ranks}
    groups = [
        tuple(tuple(sorted({track_of[rank] for rank in own})) for own in apart.get(stage, (ranks,)))
        for stage, ranks in zip(stages.stages, stages.ranks, strict=True)
    ]
    edges = (*stages.edges, *(edge.reversed for edge in stages.edges))
    index = {stage: i for i, stage in enumerate(stages.stages)}
    training = schedule.training
    look_up = _Costs(schedule, costs, index, {edge: i for i, edge in enumerate(edges)})
    entries = [look_up.entry(action) for action in schedule.actions]
    by_column = zip(*entries, strict=True) if entries else ((),) * len(_COLUMNS)
    columns: dict[str, Any] = {name: list(column) for name, column in zip(_COLUMNS, by_column, strict=True)}
    return Program(
        **columns,
        tracks=tuple(ranks for ranks, _ in classes),
        held=tuple(held for _, held in classes),
        stage_tracks=[tuple(sorted({track for tracks in sets for track in tracks})) for sets in groups],
        groups=groups,
        flows=_flows(look_up.routes, edges, groups, index, costs),
        sources=[index[edge.source] for edge in edges],
        destinations=[index[edge.destination] for edge in edges],
        gather=[costs.gather.get(stage, 0.0) for stage in stages.stages],
        optimizer=[
            max((costs.optimizer.get(rank, 0.0) for rank in ranks), default=0.0) * training for ranks, _ in classes
        ],
        static_bytes=[max(costs.static_bytes.get(rank, 0) for rank in ranks) for ranks, _ in classes],
        update_bytes=[max(costs.update_bytes.get(rank, 0) for rank in ranks) for ranks, _ in classes],
        names=target_names(stages),
        num_routes=len(look_up.routes),
        most=schedule.routes.most,
    )


Each = tuple[tuple[float, float], ...] | None
"""Seconds of every set of lanes, and the collectives in them."""
Entry = tuple[int, int, int, int, int, float, float, int, Each]
"""One action: kind, target, microbatch, to, route, seconds, collectives, bytes, seconds of each set."""


class _Costs:
    """Looks actions up in tables; made once per program."""

    def __init__(self, schedule: Schedule, costs: StepCosts, stages: dict[Stage, int], edges: dict[Edge, int]) -> None:
        self.stages, self.edges, self.costs, self.recomputed = stages, edges, costs, schedule.recompute
        # By number of the edge: hashing an edge costs more than all else that an entry takes.
        self.routes: dict[tuple[int, int, int], int] = {}
        self.transfers = {
            (edges[edge], m, to): cost for (edge, m, to), cost in costs.transfers.items() if edge in edges
        }
        self.apart = costs.lanes.costs if costs.lanes else {}

    def entry(self, action: Action) -> Entry:
        kind, target, m = action.kind, action.target, action.microbatch
        if isinstance(target, Edge):
            edge, to = self.edges[target], m if action.to is None else action.to
            route = (edge, m, to)
            number = self.routes.setdefault(route, len(self.routes))
            if kind is not _SEND:
                return RECEIVE, edge, m, to, number, 0.0, 0.0, 0, None
            transfer = self.transfers.get(route, NO_COST)
            return TRANSFER, edge, m, to, number, transfer.seconds, 0.0, transfer.bytes, None
        stage = self.stages[target]
        if kind is _REDUCE:
            seconds = self.costs.reduce.get(target, 0.0) + self.costs.action_overhead
            return REDUCE, stage, m, m, -1, seconds, 0.0, 0, None
        cost = self.costs.stages.get((target, m))
        if cost is None:
            raise GraphError(f"costs: none for {action}")
        code, seconds, collectives = self._seconds(kind, target, cost)
        each: Each = None
        if self.apart and (sets := self.apart.get((target, m))):
            each = tuple(self._seconds(kind, target, own)[1:] for own in sets)
        return code, stage, m, m, -1, seconds, collectives, cost.activation_bytes, each

    def _seconds(self, kind: Kind, stage: Stage, cost: StageCost) -> tuple[int, float, float]:
        """Kind of span, seconds, collectives in them."""
        overhead = self.costs.action_overhead
        if kind is _FORWARD:
            return FORWARD, cost.forward + overhead, cost.collectives_forward
        if kind is _WEIGHT:
            return BACKWARD_WEIGHT, cost.backward_weight + overhead, 0.0
        # all collectives of a backward are in its first part
        seconds, collectives = cost.backward_input + overhead, cost.collectives_backward
        if stage in self.recomputed:
            seconds, collectives = seconds + cost.forward, collectives + cost.collectives_forward
        if kind is _BACKWARD:
            return BACKWARD, seconds + cost.backward_weight, collectives
        return BACKWARD_INPUT, seconds, collectives


def _flows(
    routes: dict[tuple[int, int, int], int],
    edges: tuple[Edge, ...],
    groups: list[tuple[tuple[int, ...], ...]],
    index: dict[Stage, int],
    costs: StepCosts,
) -> list[tuple[tuple[int, ...], ...]]:
    known = costs.lanes.flows if costs.lanes else {}
    forward = len(edges) // 2
    usual = [_usual(edge, groups[index[edge.source]], groups[index[edge.destination]]) for edge in edges]
    found: list[tuple[tuple[int, ...], ...]] = []
    for number, m, to in routes:
        edge = edges[number]
        sources, destinations = groups[index[edge.source]], groups[index[edge.destination]]
        back = number >= forward
        route = Route(edges[number - forward], to, m) if back else Route(edge, m, to)
        pairs = known.get(route)
        if pairs is None or (len(sources) == 1 and len(destinations) == 1):
            found.append(usual[number])
            continue
        into: list[set[int]] = [set() for _ in destinations]
        for a, b in pairs:
            source, destination = (b, a) if back else (a, b)
            into[destination].update(sources[source])
        found.append(tuple(tuple(sorted(tracks)) for tracks in into))
    return found


def _usual(
    edge: Edge, sources: tuple[tuple[int, ...], ...], destinations: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """What is sent where nothing is said of it: between stages of a module lane by lane, else from all to all."""
    if edge.internal and len(sources) == len(destinations):
        return sources
    everyone = tuple(sorted({track for own in sources for track in own}))
    return (everyone,) * len(destinations)


class Run:
    """The state of a simulation: when tracks and links are free, when transfers arrived, and the spans so far.

    Times are seconds. They may be anything else to which seconds can be added and of which there is a `latest` of
    several: `busy` takes sets of what must be over.
    """

    def __init__(self, columns: Program, latest: Callable[[list[Any]], Any] = max, zero: Any = 0.0) -> None:
        self.columns, self.latest, self.zero = columns, latest, zero
        tracks = len(columns.tracks)
        self.free = [zero] * tracks  # when a track can go on, waits included
        self.idle = [zero] * tracks  # when its last work ended
        self.reduced = [zero] * tracks
        self.outgoing = [zero] * tracks
        self.incoming = [[zero] * tracks for _ in columns.sources]  # per edge
        self.collectives, self.hidden = [0.0] * tracks, [0.0] * tracks
        self.work: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
        self.side: list[tuple[float, ...]] = []  # rows of such columns
        self.transfers: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
        self.end = 0.0

    def actions(self) -> None:
        c, free, idle, latest = self.columns, self.free, self.idle, self.latest
        all_groups, destinations, inside = c.groups, c.destinations, self.collectives
        gather = list(c.gather)
        arrivals: list[list[Any]] = [[]] * c.num_routes
        track_append, kind_append, target_append, microbatch_append, start_append, stop_append, to_append = (
            column.append for column in self.work
        )
        for kind, target, m, to, route, seconds, collectives, each in zip(
            c.kinds, c.targets, c.microbatches, c.to, c.routes, c.seconds, c.collectives, c.each, strict=True
        ):
            if kind == RECEIVE:
                for tracks, arrival in zip(all_groups[destinations[target]], arrivals[route], strict=True):
                    for track in tracks:
                        free[track] = latest([free[track], arrival])
            elif kind == TRANSFER:
                arrivals[route] = self._linked(target, m, to, seconds, c.flows[route])
            elif kind == REDUCE:
                self._reduce(target, seconds)
            else:
                if kind == FORWARD and gather[target]:
                    self._gather(target)
                    gather[target] = 0.0
                for group, tracks in enumerate(all_groups[target]):
                    if each is not None:
                        seconds, collectives = each[group]
                    start = free[tracks[0]]
                    if len(tracks) > 1:
                        start = latest([free[track] for track in tracks])
                    stop = start + seconds
                    for track in tracks:
                        free[track] = idle[track] = stop
                        inside[track] += collectives
                        track_append(track)
                        kind_append(kind)
                        target_append(target)
                        microbatch_append(m)
                        start_append(start)
                        stop_append(stop)
                        to_append(to)

    def optimizer(self) -> None:
        """What follows the last action; sets `end`."""
        ready = max([*self.free, *self.reduced, *self.outgoing], default=0.0)  # what leaves last arrives last
        for track, seconds in enumerate(self.columns.optimizer):
            if seconds:
                self._span(track, OPTIMIZER, -1, -1, ready, ready + seconds)
        self.end = ready + max(self.columns.optimizer, default=0.0)

    def _linked(self, edge: int, m: int, to: int, seconds: float, flows: tuple[tuple[int, ...], ...]) -> list[Any]:
        """A transfer on links of its own; its arrival at each set of lanes. What a track sends to several of them
        leaves together: the seconds are those of the rank that sends or receives most."""
        free, incoming, outgoing, latest = self.free, self.incoming[edge], self.outgoing, self.latest
        if not seconds:
            return [latest([free[track] for track in sources]) if sources else self.zero for sources in flows]
        left: dict[int, Any] = {}
        arrivals = []
        for tracks, sources in zip(self.columns.groups[self.columns.destinations[edge]], flows, strict=True):
            if not sources:
                arrivals.append(self.zero)
                continue
            before = [free[track] for track in sources]
            before += [outgoing[track] for track in sources]
            before += [incoming[track] for track in tracks]
            start = latest(before)
            stop = start + seconds
            for track in sources:
                left[track] = latest([stop, left.get(track, stop)])
            for track in tracks:
                incoming[track] = stop
                self._transfer(track, edge, m, to, start, stop)
            arrivals.append(stop)
        for track, stop in left.items():
            outgoing[track] = stop
        return arrivals

    def _gather(self, stage: int) -> None:
        for tracks in self.columns.groups[stage]:
            start = self.latest([self.idle[track] for track in tracks])
            stop = start + self.columns.gather[stage]
            for track in tracks:
                self.idle[track] = stop
                self.free[track] = self.latest([self.free[track], stop])
                self._span(track, GATHER, stage, -1, start, stop)

    def _reduce(self, stage: int, seconds: float) -> None:
        tracks = self.columns.stage_tracks[stage]
        start = self.latest([self.latest([self.free[track], self.reduced[track]]) for track in tracks])
        stop = start + seconds
        for track in tracks:
            self.reduced[track] = stop
            self._span(track, REDUCE, stage, -1, start, stop)

    def _span(self, track: int, kind: int, target: int, m: int, start: Any, stop: Any) -> None:
        for column, value in zip(self.work, (track, kind, target, m, start, stop, m), strict=True):
            column.append(value)

    def _transfer(self, track: int, edge: int, m: int, to: int, start: Any, stop: Any) -> None:
        target = len(self.columns.stage_tracks) + edge
        for column, value in zip(self.transfers, (track, TRANSFER, target, m, start, stop, to), strict=True):
            column.append(value)
