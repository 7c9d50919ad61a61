"""The length of a step for many batches at once: one pass over a schedule's order, with arrays in the place of seconds.

What `simulate` says where messages take no time (a test compares them), at a thousandth of the price per batch: the
schedule is made and laid out once for a number of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetmesh.balance.co_located import leaders, led_modules
from hetmesh.cost import Lanes, StageCost, StepCosts
from hetmesh.errors import ScheduleError
from hetmesh.graph import ModuleGraph, Routes, Stage, StageGraph, stage_graph
from hetmesh.schedule import POLICIES, PolicyOptions
from hetmesh.simulate.lanes import group_ranks
from hetmesh.simulate.program import RECEIVE, Program, program
from hetmesh.simulate.timeline import BACKWARD, BACKWARD_INPUT, FORWARD, REDUCE, TRANSFER


@dataclass(frozen=True)
class StepReplay:
    """What steps of a graph take under a schedule, as balancers judge them (`Slots.lengths`).

    Attributes:
        policy, options: of the schedule: a key of `hetmesh.schedule.POLICIES`, and its parameters.
        shares: per module, what each of its stages takes of its forward and backward; missing: as much as others.
    """

    graph: ModuleGraph
    policy: str
    options: PolicyOptions
    shares: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()

    def __call__(self, work: np.ndarray, backward: Sequence[float], late: np.ndarray | None = None) -> np.ndarray:
        """The length of each of some steps, float64 `[steps]`; infinite where there is no such schedule.

        Args:
            work: `[steps, microbatches, modules]`: forward of all stages of each of the `led_modules`.
            backward: how many times as long as their forward their backward takes; both parts of a split one equally.
            late: bool `[microbatches]`: whether the last module takes some rows one microbatch later, in any step.
        """
        deferred = () if late is None else tuple(np.flatnonzero(late[:-1]).tolist())
        try:
            stages, program, recomputed = _columns(self, work.shape[1], deferred)
        except ScheduleError:
            return np.full(len(work), np.inf)
        led = led_modules(self.graph)
        place = [led.index(stage.module) if stage.module in led else -1 for stage in stages]
        alike = {spec.name: ((1 / spec.num_stages,) * 2,) * spec.num_stages for spec in self.graph.modules}
        known = alike | dict(self.shares)
        shares = [known[stage.module][stage.index] for stage in stages]
        forward = np.moveaxis(np.asarray(work, float), 0, 2)  # [microbatches, modules, steps]
        zero = np.zeros(len(work))
        free = [zero] * len(program.tracks)
        arrivals: list[list[np.ndarray]] = [[]] * program.num_routes
        columns = program.kinds, program.targets, program.microbatches, program.routes
        for kind, target, m, route in zip(*columns, strict=True):
            if kind == TRANSFER:
                arrivals[route] = [_latest([free[t] for t in sources], zero) for sources in program.flows[route]]
            elif kind == RECEIVE:
                for tracks, arrival in zip(program.groups[program.destinations[target]], arrivals[route], strict=True):
                    for track in tracks:
                        free[track] = _latest([free[track], arrival], zero)
            elif kind != REDUCE and place[target] >= 0:
                seconds, (once, back) = forward[m, place[target]], shares[target]
                if kind != FORWARD:
                    back *= backward[place[target]] * (1.0 if kind == BACKWARD else 0.5)
                    once = back + once * (recomputed[target] and kind in (BACKWARD, BACKWARD_INPUT))
                for tracks in program.groups[target]:
                    stop = _latest([free[track] for track in tracks], zero) + once * seconds
                    for track in tracks:
                        free[track] = stop
        return _latest(free, zero)


def _latest(times: list[np.ndarray], zero: np.ndarray) -> np.ndarray:
    """The elementwise maximum; `zero` of none."""
    if len(times) == 2 and times[0] is times[1]:
        return times[0]
    out = times[0] if times else zero
    for time in times[1:]:
        out = out if time is out else np.maximum(out, time)
    return out


@lru_cache(maxsize=64)
def _columns(
    replay: StepReplay, microbatches: int, late: tuple[int, ...]
) -> tuple[tuple[Stage, ...], Program, tuple[bool, ...]]:
    """Of a step of so many microbatches in every module, in which some are taken late: its stages, the columns of its
    schedule, and per stage whether its backward runs its forward again."""
    graph, stages = replay.graph, stage_graph(replay.graph)
    pairs = [(m, m) for m in range(microbatches)] + [(m, m + 1) for m in late]
    led_by, llm = leaders(graph), graph.llm.name
    follow = {name for name in graph.order if led_by[name] == llm or name in graph.topology.after_llm}
    into = {(b.source, b.destination) for b in graph.boundaries if b.destination in follow and b.source not in follow}
    routes = Routes.make(dict.fromkeys(graph.order, microbatches), dict.fromkeys(into, pairs) if late else None)
    schedule = POLICIES[replay.policy](stages, routes, True, replay.options)
    costs = {(stage, m): StageCost(0.0) for stage in stages.stages for m in range(microbatches)}
    recomputed = tuple(stage in schedule.recompute for stage in stages.stages)
    return stages.stages, program(schedule, StepCosts(costs, lanes=Lanes(apart(graph, stages)))), recomputed


def apart(graph: ModuleGraph, stages: StageGraph) -> dict[Stage, tuple[tuple[int, ...], ...]]:
    """Stages whose lanes lie on ranks of different kinds, by the stages that these hold, no lane on ranks of two, and
    start apart: the ranks of each kind."""
    kinds = [frozenset(ranks) for ranks, _ in stages.rank_classes()]
    found = {}
    for stage in stages.stages:
        groups = group_ranks(graph[stage.module], stage.index)
        of_kind = [[ranks for ranks in groups if kind.issuperset(ranks)] for kind in kinds]
        own = [tuple(sorted(rank for ranks in some for rank in ranks)) for some in of_kind if some]
        if len(own) > 1 and sum(map(len, of_kind)) == len(groups):
            found[stage] = tuple(own)
    return found
