"""Interleaved 1F1B: several stages per rank of a pipeline (Narayanan et al., arXiv 2104.04473, section 2.2.2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from hetmesh.errors import ScheduleError
from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.list_schedule import Capped, Fixed, Group, list_schedule, nominal, run_ahead
from hetmesh.schedule.schedule import (
    DEFAULT,
    Action,
    Kind,
    PolicyOptions,
    Schedule,
    backward_kinds,
    peaks_in_flight,
    schedule_of,
)
from hetmesh.schedule.sequential import by_stage, one_by_one


@lru_cache(maxsize=64)
def interleaved(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in which the stages of a module that share ranks take turns in rounds of as many
    microbatches as the pipeline has ranks, or a few more where they do not divide the step's.

    Modules with one stage per rank run 1F1B. Warm-up forwards of rank r of p with v stages each, in rounds of n
    microbatches: (p - 1 - r) + (v - 1) n, or with `options.early` Megatron-LM's 2 (p - 1 - r) + (v - 1) n: the same
    makespan. Where these come to a halt, because rounds and the microbatches that feed each other do not go together,
    modules before the LLM warm up with more, at last with all.
    """
    routes = Routes.of(stages, microbatches)
    steps = one_by_one(stages, routes, training)
    more = 0
    while True:
        try:
            return _interleaved(stages, routes, steps, training, options, more)
        except ScheduleError:
            if more >= routes.most:
                raise
            more = max(1, 2 * more)


def _interleaved(
    stages: StageGraph,
    routes: Routes,
    steps: Sequence[Sequence[Action]],
    training: bool,
    options: PolicyOptions,
    more: int,
) -> Schedule:
    groups: list[Group] = []
    caps: dict[Stage, int] = {}
    shared: set[Stage] = set()
    forwards, backwards = by_stage(steps, Kind.FORWARD), by_stage(steps, Kind.BACKWARD)
    for stage in reversed(stages.stages):
        if stage in caps:
            continue
        own = stages.of_module(stage.module)
        p = len(dict.fromkeys(stages.ranks_of(s) for s in own))
        ahead = [run_ahead(routes, e, caps[e.destination], backwards.get(e.destination)) for e in stages.outputs(stage)]
        cap = max(ahead, default=1) + (more if ahead else 0)
        if p == len(own):
            caps[stage] = cap
            groups.append(Capped(stage, stages, routes, cap, forwards.get(stage, ()), backwards.get(stage, ())))
            continue
        released = backwards.get(stage) or range(routes.count(stage.module))
        for r in range(p):
            sequence = tuple(_sequence(stages, own[r::p], r, p, released, training, options.early, cap - 1))
            groups.append(Fixed(own[r::p], sequence))
            caps |= {s: _peak(sequence, s) for s in own[r::p]}
        shared |= set(own)
    order = list_schedule(stages, routes, groups, nominal(stages, routes))
    held = peaks_in_flight(order, stages, routes, training)
    in_flight = {s: held[s] if s in shared else caps[s] for s in stages.stages}
    return schedule_of(order, stages, routes, training, in_flight, validated=options.validated)


def _sequence(
    stages: StageGraph,
    chunks: tuple[Stage, ...],
    r: int,
    p: int,
    released: Sequence[int],
    training: bool,
    early: bool,
    downstream: int,
) -> Iterator[Action]:
    """What pipeline rank `r` of `p` does, in order, if microbatches have their backwards in the order `released` and
    modules after this one hold `downstream` of them before their first backward."""
    microbatches = len(released)
    forwards = list(_rounds(chunks, p, microbatches))
    backwards = [
        (s, released[i]) for s, i in _rounds(chunks[::-1], p, microbatches) if training and backward_kinds(s, stages)
    ]
    size = _round_sizes(p, microbatches)[0]
    warm = (p - 1 - r) * (2 if early else 1) + (len(chunks) - 1) * size
    warm += len(chunks) * size * -(-downstream // size)  # whole rounds that later modules wait for
    warm = min(warm, len(forwards)) if backwards else len(forwards)
    yield from (Action(Kind.FORWARD, s, m) for s, m in forwards[:warm])
    ahead, done = iter(forwards[warm:]), set(forwards[:warm])
    for s, m in backwards:
        for following in ahead:
            yield Action(Kind.FORWARD, *following)
            done.add(following)
            if (s, m) in done:  # after more than one where other stages have no backward
                break
        yield Action(Kind.BACKWARD, s, m)
    yield from (Action(Kind.FORWARD, s, m) for s, m in ahead)


def _rounds(chunks: tuple[Stage, ...], p: int, microbatches: int) -> Iterator[tuple[Stage, int]]:
    first = 0
    for size in _round_sizes(p, microbatches):
        for chunk in chunks:
            for m in range(first, first + size):
                yield chunk, m
        first += size


def _round_sizes(p: int, microbatches: int) -> list[int]:
    """As many rounds as have `p` microbatches each; what is left over goes to the first ones."""
    rounds = max(microbatches // p, 1)
    return [microbatches // rounds + (i < microbatches % rounds) for i in range(rounds)]


def _peak(sequence: tuple[Action, ...], stage: Stage) -> int:
    """The most microbatches of `stage` between forward and backward in a rank's sequence."""
    changes = (1 if action.kind is Kind.FORWARD else -1 for action in sequence if action.target == stage)
    return max(itertools.accumulate(changes), default=0)
