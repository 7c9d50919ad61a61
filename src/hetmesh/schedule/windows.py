"""Windows: from when on an action that runs beside others may begin. Its place in the schedule is when it is over.

A host that computes begins it in collectives (`windows`). One that only queues work for a device hands it over early,
and the device finds the gaps (`ahead`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate

from hetmesh.graph import Edge, Route, Stage
from hetmesh.schedule.schedule import (
    NO_STAGES,
    Action,
    Kind,
    Schedule,
    backward_kinds,
    dependencies,
    readers,
    takes_part,
)


def windows(schedule: Schedule, rank: int, stays: Callable[[Route], bool]) -> dict[Action, int]:
    """The actions that `rank` may begin before their place, in order, each with how many of its others must be over.

    They are the computation of the stages beside on a rank that has other stages too, and what these stages hand each
    other. All else stays at its place: were messages to other ranks put off until a rank lends itself, another rank
    could wait for one while this one waits for that rank. Begun in order, each is in its window where all that it needs
    has come, and its stage holds fewer microbatches than its cap: what a stage with a backward holds follows from that
    order, while others hold what others have yet to read.

    Args:
        stays: whether what travels along a route between two stages beside stays on its rank, on every rank.
    """
    stages = schedule.stages
    held = frozenset(stage for stage in stages.stages if rank in stages.ranks_of(stage))
    beside = held & schedule.beside if schedule.in_collectives else NO_STAGES
    if not beside or beside == held:
        return {}
    place = {action: i for i, action in enumerate(schedule.actions)}
    own = [i for i, action in enumerate(schedule.actions) if takes_part(action, held)]
    room = room_after(schedule, place)
    found: dict[Action, int] = {}
    begin = 0
    for i in own:
        action = schedule.actions[i]
        target = action.target
        if isinstance(target, Edge):
            if not {target.source, target.destination} <= beside or not stays(action.route):
                continue
        elif target not in beside or action.kind is Kind.REDUCE:
            continue
        needed = [place[other] for other in dependencies(action, stages, schedule.routes, schedule.split)]
        needed = [i for i in needed if takes_part(schedule.actions[i], held) and schedule.actions[i] not in found]
        begin = max([begin, *(bisect_right(own, i) for i in (*needed, room.get(action, -1)))])
        found[action] = begin
    return found


def room_after(schedule: Schedule, place: Mapping[Action, int]) -> dict[Action, int]:
    """Per forward of a stage beside that has a cap and no backward, the place after which it holds fewer microbatches
    than its cap, if all that runs beside and comes before is over. `place`: of each action; -1 is before all."""
    stages, routes = schedule.stages, schedule.routes
    found: dict[Action, int] = {}
    for stage in schedule.beside & schedule.in_flight.keys():
        if schedule.training and backward_kinds(stage, stages):
            continue
        forwards = sorted(
            (Action(Kind.FORWARD, stage, m) for m in range(routes.count(stage.module))), key=place.__getitem__
        )
        for i, forward in enumerate(forwards[schedule.in_flight[stage] :], schedule.in_flight[stage]):
            read: list[int] = []
            for earlier in forwards[:i]:
                some = [Action(Kind.FORWARD, *reader) for reader in readers(stage, earlier.microbatch, stages, routes)]
                later = (place[a] for a in some if a.stage not in schedule.beside or place[a] > place[forward])
                read.append(max(later, default=-1))
            found[forward] = sorted(read)[i - schedule.in_flight[stage]]
    return found


def uses_collectives(schedule: Schedule) -> bool:
    """Whether there is a rank that may begin to compute something before its place, and computes what this runs beside
    until then, wherever messages go."""
    for (rank, *_), _ in schedule.stages.rank_classes():
        begin, own = windows(schedule, rank, lambda _: True), schedule.of_rank(rank)
        computed = [isinstance(action.target, Stage) and action.kind is not Kind.REDUCE for action in own]
        others = [*accumulate((c and a not in begin for c, a in zip(computed, own, strict=True)), initial=0)]
        if any(computed[i] and others[i] > others[begin.get(action, i)] for i, action in enumerate(own)):
            return True
    return False


_AHEAD = 1
"""Microbatches. A device takes about a thousand launches until the host has to wait: were all forwards of encoders
queued at once, it would have nothing else meanwhile."""


def ahead(schedule: Schedule) -> Schedule:
    """The order in which an asynchronous device is given the actions: those that run in collectives of others before
    the actions whose collectives these are.

    Computation of the stages beside, and what they send, comes as soon as what it needs has, in its own order on every
    rank, and within the caps; a forward no sooner than the other stages of one of its ranks have a microbatch left to
    run, forward and backward, until its place. It is one order for all ranks: they launch their collectives alike,
    those of encoders too.
    """
    if not schedule.in_collectives:
        return schedule
    stages, place = schedule.stages, {action: i for i, action in enumerate(schedule.actions)}
    soonest = _soonest(schedule)
    moved = [stage for stage in stages.stages if stage in soonest]
    ranks = {stage: frozenset(stages.ranks_of(stage)) for stage in moved}
    sharing = {stage: [other for other in moved if ranks[stage] & ranks[other]] for stage in moved}
    room, behind, last = room_after(schedule, place), dict(place), dict.fromkeys(moved, -1)
    for action in schedule.actions:
        target, kind = action.target, action.kind
        if isinstance(target, Stage):
            ends = {target}
        else:
            ends = {target.source, target.destination} if kind is Kind.RECV else {target.source}
        if kind is Kind.REDUCE or not soonest.keys() >= ends:
            continue
        needed = [behind[other] for other in dependencies(action, stages, schedule.routes, schedule.split)]
        if isinstance(target, Stage):
            needed += [last[target], room.get(action, -1)]
            if kind is Kind.FORWARD:
                needed.append(soonest[target](place[action]))
            last |= dict.fromkeys(sharing[target], max(needed))
        behind[action] = max(needed)
    return replace(schedule, actions=tuple(sorted(schedule.actions, key=behind.__getitem__)))


def _soonest(schedule: Schedule) -> dict[Stage, Callable[[int], int]]:
    """Per stage beside others on some of its ranks: of a place, behind which action its forward is queued."""
    stages = schedule.stages
    others: dict[tuple[int, ...], list[Stage]] = {}
    for stage in stages.stages:
        if stage not in schedule.beside:
            others.setdefault(tuple(stages.ranks_of(stage)), []).append(stage)
    found: dict[Stage, Callable[[int], int]] = {}
    own: list[tuple[frozenset[int], int, list[int]]] = []
    for held, some in others.items():
        wanted = frozenset(some)
        places = [i for i, a in enumerate(schedule.actions) if a.target in wanted and a.kind is not Kind.REDUCE]
        own.append((frozenset(held), 2 * _AHEAD * len(some), places))
    for stage in schedule.beside:
        tracks = [(count, places) for held, count, places in own if held.intersection(stages.ranks_of(stage))]
        if tracks:

            def queued(place: int, tracks: list[tuple[int, list[int]]] = tracks) -> int:
                before = ((bisect_left(places, place) - count, places) for count, places in tracks)
                return min(places[n - 1] if n > 0 else -1 for n, places in before)

            found[stage] = queued
    return found
