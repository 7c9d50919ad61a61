"""One microbatch of the LLM after the other: the order that every policy starts from, and the sequential policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

from hetmesh.graph import Edge, Routes, Stage, StageGraph
from hetmesh.schedule.schedule import DEFAULT, Action, Kind, PolicyOptions, Schedule, validate, with_messages


def one_by_one(stages: StageGraph, routes: Routes, training: bool = True) -> list[list[Action]]:
    """Compute actions, per microbatch of the LLM: what it needs and is not over yet, itself, and the backwards for
    which nothing is left to wait. What feeds nobody and is not needed on the way comes last."""
    needed = forwards_needed(stages, routes)
    done = dict.fromkeys(stages.stages, 0)
    waiting: dict[Stage, dict[int, int]] = {s: {} for s in stages.backward_stages} if training else {}
    steps: list[list[Action]] = []

    def backward(stage: Stage, m: int, step: list[Action]) -> None:
        step.append(Action(Kind.BACKWARD, stage, m))
        del waiting[stage][m]
        for route in routes.into(stages.inputs(stage), m):
            if route.edge in stages.gradient_edges:
                waiting[route.edge.source][route.source] -= 1

    def forwards(stage: Stage, stop: int, step: list[Action]) -> None:
        for m in range(done[stage], stop):
            step.append(Action(Kind.FORWARD, stage, m))
            if stage in waiting:
                waiting[stage][m] = sum(1 for _ in routes.out_of(stages.gradient_outputs(stage), m))
                if not waiting[stage][m]:  # the LLM, and rows that nobody wants
                    backward(stage, m, step)
        done[stage] = max(done[stage], stop)

    def backwards(step: list[Action]) -> None:
        for stage in reversed(stages.stages):
            for m in [m for m, count in waiting.get(stage, {}).items() if not count]:
                backward(stage, m, step)

    for m in range(routes.count(stages.llm.module)):
        step: list[Action] = []
        for stage in stages.stages:
            forwards(stage, needed[stage.module][m], step)
        backwards(step)
        steps.append(step)
    for stage in stages.stages if steps else ():
        forwards(stage, routes.count(stage.module), steps[-1])
        backwards(steps[-1])
    return steps


def forwards_needed(stages: StageGraph, routes: Routes) -> dict[str, list[int]]:
    """Per module and microbatch of the LLM, how many forwards come before its own, if all go by number; of modules
    after it, and of others that feed nobody, how many follow it at once."""
    llm = stages.llm.module
    ends = {stage.module for stage in stages.stages if stage in stages.after_llm or not stages.outputs(stage)}
    needed = {module: list(range(1, routes.count(llm) + 1)) for module in {llm, *ends}}
    for module in reversed(list(dict.fromkeys(stage.module for stage in stages.stages))):
        if module in needed:
            continue
        most = [0] * routes.count(llm)
        for edge in stages.edges:
            if edge.source.module == module and not edge.internal:
                ahead = forwards_before(routes, edge)
                wanted = needed[edge.destination.module]
                most = [max(a, ahead[n]) for a, n in zip(most, wanted, strict=True)]
        needed[module] = most
    return needed


def forwards_before(routes: Routes, edge: Edge) -> list[int]:
    """How many forwards of the source of an edge must be over before the first n of its destination are; n from 0."""
    count = routes.count(edge.destination.module)
    last = (max((r.source + 1 for r in routes.into((edge,), m)), default=0) for m in range(count))
    return list(itertools.accumulate(last, max, initial=0))


def by_stage(steps: Iterable[Sequence[Action]], kind: Kind) -> dict[Stage, list[int]]:
    """Per stage, its microbatches in the order of their actions of one kind."""
    found: dict[Stage, list[int]] = {}
    for action in itertools.chain.from_iterable(steps):
        if action.kind is kind and isinstance(action.target, Stage):
            found.setdefault(action.target, []).append(action.microbatch)
    return found


@lru_cache(maxsize=64)
def sequential(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule that keeps one microbatch of the LLM in flight, and of other modules those that it needs
    and that still have to feed a later one; with `training=False` the forwards alone."""
    routes = Routes.of(stages, microbatches)
    order = [action for step in one_by_one(stages, routes, training) for action in step]
    actions = list(with_messages(order, stages, routes, frozenset()))
    if training:
        actions += [Action(Kind.REDUCE, s, -1) for s in reversed(stages.stages) if s in stages.trainable_stages]
    return validate(Schedule(stages, routes, tuple(actions), training))
