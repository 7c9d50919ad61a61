"""Lower bounds of a simulated makespan: the busiest rank, and the longest chain of dependencies."""

from __future__ import annotations

import itertools

from hetmesh.cost import StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.program import RECEIVE, program
from hetmesh.simulate.timeline import BACKWARD_WEIGHT, FORWARD, LAYERS, REDUCE, TRANSFER


def busiest_rank(schedule: Schedule, costs: StepCosts) -> float:
    """Seconds of the rank that has most to do: no makespan is shorter."""
    p = program(schedule, costs)
    busy = list(p.optimizer)
    for stage in {target for kind, target in zip(p.kinds, p.targets, strict=True) if kind == FORWARD}:
        for track in p.stage_tracks[stage]:
            busy[track] += p.gather[stage]
    for kind, target, seconds, each in zip(p.kinds, p.targets, p.seconds, p.each, strict=True):
        if kind in LAYERS:
            for g, tracks in enumerate(p.groups[target]):
                for track in tracks:
                    busy[track] += each[g][0] if each else seconds
    return max(busy, default=0.0)


def critical_path(schedule: Schedule, costs: StepCosts) -> float:
    """Seconds of the longest chain of dependencies, were there a rank and a link for everything: no makespan is
    shorter."""
    p = program(schedule, costs)
    count = p.most
    forward_edges = len(p.sources) // 2
    places = list(itertools.accumulate((len(groups) for groups in p.groups), initial=0))  # of a stage's first set
    cells = places[-1] * count
    ready = [0.0] * cells  # when a set's inputs, then its gradients, are there
    forward, first, last = [0.0] * cells, [0.0] * cells, [0.0] * cells  # ends of forward, first and last part
    arrivals: list[list[float]] = [[]] * p.num_routes
    longest = 0.0
    for kind, target, m, to, route, seconds, each in zip(
        p.kinds, p.targets, p.microbatches, p.to, p.routes, p.seconds, p.each, strict=True
    ):
        if kind == RECEIVE:
            for i, arrival in enumerate(arrivals[route], places[p.destinations[target]]):
                ready[i * count + to] = max(ready[i * count + to], arrival)
        elif kind == TRANSFER:
            made, source = forward if target < forward_edges else first, p.sources[target]
            ends = {
                track: made[i * count + m] for i, own in enumerate(p.groups[source], places[source]) for track in own
            }
            arrivals[route] = [max((ends[track] + seconds for track in own), default=0.0) for own in p.flows[route]]
            longest = max(longest, *arrivals[route])
        elif kind == REDUCE:
            longest = max(
                longest, seconds + max(last[places[target] * count : places[target + 1] * count], default=0.0)
            )
        else:
            for g in range(len(p.groups[target])):
                at = (places[target] + g) * count + m
                own = each[g][0] if each else seconds
                if kind == FORWARD:
                    forward[at] = max(ready[at], p.gather[target]) + own
                    ready[at] = 0.0
                elif kind == BACKWARD_WEIGHT:
                    last[at] = first[at] + own
                else:
                    first[at] = last[at] = max(forward[at], ready[at]) + own
                longest = max(longest, forward[at], last[at])
    return longest + max(p.optimizer, default=0.0)
