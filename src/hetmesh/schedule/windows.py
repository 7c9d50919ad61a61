"""Windows: from when on an action that runs beside others may begin. Its place in the schedule is when it is over."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

from hetmesh.graph import Edge, Route
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
