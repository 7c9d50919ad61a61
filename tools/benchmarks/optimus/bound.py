"""What no order of a filled step is below: the LLM waits for its first rows, and the encoder's sums follow the LLM's.

Microbatches are all alike here. Forwards: of the first k microbatches of the LLM, each rank of an encoder's pipeline
has to run its part, one after the other, from when the first rows can be there to when the last of them are on their
way; the LLM's k-th forward starts no earlier, and by its latest starts (`analysis.latest_starts`) everything behind it
is late by as much. Backwards: those of the last microbatch follow the LLM's last one, through all stages. Collectives
of the LLM, in which encoder kernels run, are taken to be endless: only the encoder's own order bounds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from analysis.latest_starts import dependency_points
from benchmarks.optimus import models
from benchmarks.optimus.layouts import EARLY, chain, step
from hetmesh.cost import StepCosts
from hetmesh.graph import Edge, Routes, Stage, StageGraph
from hetmesh.schedule import POLICIES, PolicyOptions
from hetmesh.simulate import simulate


@dataclass(frozen=True)
class Alone:
    """The LLM by itself.

    Attributes:
        seconds: of the step.
        optimizer: seconds of the optimizer, which are in it.
        wanted: the latest start of each forward of its first stage.
        released: when the last backward of its first stage ends.
    """

    seconds: float
    optimizer: float
    wanted: tuple[float, ...]
    released: float


@dataclass(frozen=True)
class Bound:
    """Of one plan of an encoder.

    Attributes:
        seconds: no order takes less.
        head: seconds by which the LLM is late at least.
        work: seconds of the encoder on the rank that has most, its collectives included.
        traffic: seconds of summing the encoder's gradients over its lanes, on the rank that has most.
    """

    seconds: float
    head: float
    work: float
    traffic: float


def llm_alone(dp: int, constants: dict[str, float]) -> Alone:
    """The LLM's own step, interleaved as it is in the filled one."""
    return _alone(dp, tuple(sorted(constants.items())))


@lru_cache(maxsize=8)
def _alone(dp: int, key: tuple[tuple[str, float], ...]) -> Alone:
    model, batch = step(chain("llm", dp, (1,) * (models.PP * models.VIRTUAL)), dict(key))
    schedule = POLICIES["interleaved"](model.stages, batch.routes, True, PolicyOptions(early=EARLY))
    costs = model.costs(batch, schedule)
    timeline = simulate(schedule, costs)
    first = Stage("llm", 0)
    ends = [span.stop for span in timeline.spans() if span.target == str(first) and span.kind == "B"]
    points = dependency_points(schedule, costs, timeline.makespan, first)
    return Alone(timeline.makespan, max(costs.optimizer.values()), points.forward, max(ends))


def fill_bound(alone: Alone, stages: StageGraph, routes: Routes, costs: StepCosts, pp: int) -> Bound:
    """What no order of the encoder `vision` on the LLM's ranks is below.

    Args:
        costs: of the step, transfers included.
        pp: pipeline ranks of the encoder, on which its stages take turns.
    """
    own = stages.of_module("vision")
    forward, backward = ([_least(costs, stage, kind) for stage in own] for kind in ("forward", "backward"))
    there = [_hop(costs, Edge(a, b)) for a, b in pairwise(own)]
    back = [_hop(costs, Edge(b, a)) for a, b in pairwise(own)]
    out = [_boundary(costs, stages, back) for back in (False, True)]
    starts = list(accumulate((a + b for a, b in zip(forward, there, strict=False)), initial=0.0))
    behind = [starts[-1] + forward[-1] + out[0] - start - each for start, each in zip(starts, forward, strict=True)]
    share = routes.count("vision") / routes.count("llm")

    def rows(k: int) -> float:
        """When the rows of k microbatches of the LLM can be there."""
        count = math.ceil(k * share)
        ranks = (starts[r] + count * sum(forward[r::pp]) + behind[len(own) - pp + r] for r in range(pp))
        return max(starts[-1] + forward[-1] + out[0], *ranks)

    head = max(rows(k) - wanted for k, wanted in enumerate(alone.wanted, 1))
    last = rows(1) + alone.released + out[1] + sum(backward) + sum(back)
    traffic = [sum(costs.reduce[stage] for stage in own[r::pp]) for r in range(pp)]
    seconds = max(alone.seconds - alone.optimizer + head, last) + min(traffic) + max(costs.optimizer.values())
    per_microbatch = [cost.forward + cost.backward for cost in (costs.stages[stage, 0] for stage in own)]
    work = [routes.count("vision") * sum(per_microbatch[r::pp]) for r in range(pp)]
    return Bound(seconds, head, max(work), max(traffic))


def _least(costs: StepCosts, stage: Stage, kind: str) -> float:
    return min(getattr(cost, kind) for (other, _), cost in costs.stages.items() if other == stage)


def _hop(costs: StepCosts, edge: Edge) -> float:
    return min((cost.seconds for route, cost in costs.transfers.items() if route.edge == edge), default=0.0)


def _boundary(costs: StepCosts, stages: StageGraph, back: bool) -> float:
    edges = [edge for edge in stages.edges if not edge.internal]
    return min(_hop(costs, edge.reversed if back else edge) for edge in edges)
