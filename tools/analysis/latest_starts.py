"""Latest starts: how late each action may start without a longer step (ALAP). The engine's pass, backwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmesh.cost.step_costs import StepCosts
from hetmesh.errors import GraphError
from hetmesh.graph import Stage
from hetmesh.schedule import Schedule
from hetmesh.simulate.busy import slowed_program
from hetmesh.simulate.program import RECEIVE
from hetmesh.simulate.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, REDUCE, TRANSFER


@dataclass(frozen=True, slots=True)
class DependencyPoints:
    """By when a stage wants its inputs, and from when its gradients are there, if it runs as late as it may.

    Attributes:
        forward: per microbatch, the latest start of its forward (Optimus' F).
        backward: per microbatch, the latest end of its backward (B); empty where the stage has none.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def latest_starts(schedule: Schedule, costs: StepCosts, makespan: float) -> np.ndarray:
    """Per action of the schedule, in its order, the latest start in seconds at which the step still takes `makespan`.

    A backward pass over dependencies, each rank's order, and the order of transfers on each link (Optimus, arXiv
    2408.03505, section 4.3). It works for any policy. Transfers are beside work, as
    in `simulate`. Actions take the seconds of that simulation, though run later they may have other
    ranks beside them (`StepCosts.busy_slowdown`). A RECV's latest start is the latest arrival. Of lanes that
    start apart (`StepCosts.lanes`) it is the first one's.

    Raises:
        GraphError: there is no cost for a stage and microbatch, or `makespan` is too short for the schedule.
    """
    p = slowed_program(schedule, costs)
    end = makespan - max(p.optimizer, default=0.0)
    tracks = range(len(p.tracks))
    work, wait = [end for _ in tracks], [end for _ in tracks]  # by when a track's work, and its waits, must be over
    reduced, outgoing = [end for _ in tracks], [end for _ in tracks]
    all_incoming = [[end for _ in tracks] for _ in p.sources]
    arrival = [[end] * len(flows) for flows in p.flows]
    first: dict[int, int] = {}  # stage -> place of its first forward, which its gather precedes
    for i in range(len(p.kinds) - 1, -1, -1):
        if p.kinds[i] == FORWARD:
            first[p.targets[i]] = i
    out = np.zeros(len(p.kinds))
    for i in range(len(p.kinds) - 1, -1, -1):
        kind, target, seconds = p.kinds[i], p.targets[i], p.seconds[i]
        start = end
        if kind == RECEIVE:
            for g, own in enumerate(p.groups[p.destinations[target]]):
                arrival[p.routes[i]][g] = min(wait[track] for track in own)
            start = min(arrival[p.routes[i]])
        elif kind == TRANSFER:
            route, incoming = p.routes[i], all_incoming[target]
            left: dict[int, float] = {}
            for own, sources, latest in zip(
                p.groups[p.destinations[target]], p.flows[route], arrival[route], strict=True
            ):
                if not sources:
                    continue
                if seconds:
                    latest = min(latest, *(outgoing[r] for r in sources), *(incoming[r] for r in own)) - seconds
                    left |= {track: min(latest, left.get(track, latest)) for track in sources}
                    for track in own:
                        incoming[track] = latest
                for track in sources:
                    work[track], wait[track] = min(work[track], latest), min(wait[track], latest)
                start = min(start, latest)
            for track, latest in left.items():
                outgoing[track] = latest
        elif kind == REDUCE:
            own = p.stage_tracks[target]
            start = min(reduced[track] for track in own) - seconds
            for track in own:
                reduced[track] = start
                work[track], wait[track] = min(work[track], start), min(wait[track], start)
        else:
            gathered = p.gather[target] if first.get(target) == i else 0.0
            each = p.each[i]
            for g, own in enumerate(p.groups[target]):
                latest = min(work[track] for track in own) - (each[g][0] if each else seconds)
                for track in own:
                    wait[track], work[track] = latest, latest - gathered
                start = min(start, latest)
        out[i] = start
    earliest = min([*work, *out.tolist()], default=0.0)
    if earliest < -1e-9 * max(abs(makespan), 1e-9):
        raise GraphError(f"makespan {makespan:g} s is {-earliest:g} s too short for this schedule")
    return out


def dependency_points(schedule: Schedule, costs: StepCosts, makespan: float, stage: Stage) -> DependencyPoints:
    """The dependency points of `stage`, e.g. the first one of an LLM whose encoder runs in its bubbles.

    Raises:
        GraphError: see `latest_starts`.
    """
    p = slowed_program(schedule, costs)
    starts = latest_starts(schedule, costs, makespan)
    index = schedule.stages.stages.index(stage)
    forward = [0.0] * schedule.routes.count(stage.module)
    backward: dict[int, float] = {}
    for kind, target, m, seconds, start in zip(
        p.kinds, p.targets, p.microbatches, p.seconds, starts.tolist(), strict=True
    ):
        if target != index:
            continue
        if kind == FORWARD:
            forward[m] = start
        elif kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            backward.setdefault(m, start + seconds)  # the gradient of the input is there after the first part
    return DependencyPoints(tuple(forward), tuple(backward[m] for m in sorted(backward)))
