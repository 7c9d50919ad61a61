"""How long the simulator takes for a step: a million actions, and ten thousand ranks.

The orders are made directly, 1F1B with a forward and a backward of equal length in closed form: the policies, which
search for theirs, take longer than the simulation. Seconds are of CPU, on one core; `wall_seconds` beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from hetmesh.cost import StageCost, StepCosts, TransferCost
from hetmesh.graph import Activation, BoundarySpec, ModuleGraph, ModuleSpec, Routes, Stage, StageGraph, stage_graph
from hetmesh.layout import MeshSpec
from hetmesh.schedule import Action, Kind, Schedule
from hetmesh.schedule.schedule import with_messages
from hetmesh.simulate import simulate

JUDGES = ("src/hetmesh/schedule", "src/hetmesh/simulate")
"""What an output of it judges (`kept.py`)."""

DEPTH = 64  # pipeline stages
LANES = 157  # 64 x 157 = 10,048 ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--actions", type=int, default=1_000_000, help="of the large case (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases; the first one is what `actions` and `seconds` are of."""
    cases = [
        _case("one module on 64 ranks", _graph(1, encoder=False), args.actions),
        _case("10,048 ranks", _graph(LANES, encoder=False), args.actions // 10),
        _case("10,048 ranks, an encoder on all of them", _graph(LANES, encoder=True), args.actions // 10),
    ]
    first = cases[0]
    return {key: first[key] for key in ("actions", "seconds", "actions_per_second")} | {"cases": cases}


def table(result: dict[str, Any]) -> str:
    """The cases as lines."""
    lines = [f"{'case':42}{'actions':>10}{'rows':>6}{'seconds':>9}{'wall':>8}{'actions/s':>11}"]
    lines += [
        f"{c['name']:42}{c['actions']:>10}{c['rows']:>6}{c['seconds']:>9.2f}{c['wall_seconds']:>8.2f}"
        f"{c['actions_per_second']:>11.0f}"
        for c in result["cases"]
    ]
    return "\n".join(lines)


def _case(name: str, stages: StageGraph, actions: int) -> dict[str, Any]:
    per_microbatch = len(_order(stages, 1)) + 4 * len(stages.edges)
    schedule = _schedule(stages, max(actions // per_microbatch, 1))
    costs = StepCosts(
        {(s, m): StageCost(0.01, 0.01, 0.01, activation_bytes=1000) for s in stages.stages for m in _counted(schedule)},
        {r: TransferCost(0.001, 100) for e in stages.edges for r in schedule.routes.along(e)},
        gather=dict.fromkeys(stages.stages, 0.1),
        reduce=dict.fromkeys(stages.stages, 0.1),
    )
    cpu, wall = time.process_time(), time.perf_counter()
    timeline = simulate(schedule, costs)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "name": name,
        "actions": len(schedule.actions),
        "ranks": sum(map(len, timeline.tracks)),
        "rows": len(timeline.tracks),
        "seconds": cpu,
        "wall_seconds": wall,
        "actions_per_second": len(schedule.actions) / cpu,
        "makespan": timeline.makespan,
    }


def _counted(schedule: Schedule) -> range:
    return range(schedule.routes.most)


def _graph(lanes: int, *, encoder: bool) -> StageGraph:
    layers = tuple(f"layer{i}" for i in range(DEPTH))
    ranks = range(DEPTH * lanes)
    llm = ModuleSpec(
        "llm",
        MeshSpec.make(ranks, pp=DEPTH, dp_replicate=lanes),
        layers=layers,
        splits=tuple((layer,) for layer in layers),
        activation=Activation(1, True),
    )
    if not encoder:
        return stage_graph(ModuleGraph((llm,)))
    vision = ModuleSpec("vision", MeshSpec.make(ranks, dp_replicate=len(ranks)))
    return stage_graph(ModuleGraph((vision, llm), (BoundarySpec("vision", "llm"),)))


def _schedule(stages: StageGraph, microbatches: int) -> Schedule:
    order = _order(stages, microbatches)
    last = {a.target: a for a in order if a.kind is Kind.BACKWARD}
    routes = Routes.of(stages, microbatches)
    return Schedule(stages, routes, with_messages(order, stages, routes, frozenset(), last.values()))


def _order(stages: StageGraph, microbatches: int) -> list[Action]:
    """1F1B over the LLM; the encoder, where there is one, before and after it."""
    llm = stages.of_module("llm")
    encoders = [s for s in stages.stages if s not in llm]
    order = [Action(Kind.FORWARD, s, m) for s in encoders for m in range(microbatches)]
    order += _one_f_one_b(llm, microbatches)
    return order + [Action(Kind.BACKWARD, s, m) for s in encoders for m in range(microbatches)]


def _one_f_one_b(llm: tuple[Stage, ...], microbatches: int) -> Iterator[Action]:
    """Stage s of p runs forward i in slot s + 2i and backward i in slot 2p - 1 - s + 2i: one of both in every slot."""
    p = len(llm)
    for slot in range(2 * (microbatches + p)):
        for s, stage in enumerate(llm):
            forward, odd = divmod(slot - s, 2)
            if not odd and 0 <= forward < microbatches:
                yield Action(Kind.FORWARD, stage, forward)
            backward, odd = divmod(slot - (2 * p - 1 - s), 2)
            if not odd and 0 <= backward < microbatches:
                yield Action(Kind.BACKWARD, stage, backward)
