"""Ranks of one node that compute at the same time slow each other down: how much longer each action takes.

Processor sharing: with k ranks of its node computing, an action goes on at 1 / slowdown(k) of its speed alone, and the
rate changes whenever an action on the node starts or stops. An event loop over the dependencies of all actions finds
the seconds of each; `engine` then walks over the order with them, as it does without any slowdown.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hetmesh.cost.step_costs import StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.program import RECEIVE, Program, program
from hetmesh.simulate.timeline import FORWARD, REDUCE, TRANSFER

Load = tuple[tuple[int, int], ...]
"""(node of the machine, how many of its ranks are busy) pairs."""


def slowed_program(schedule: Schedule, costs: StepCosts) -> Program:
    """The columns of `schedule` under `costs`, with the seconds that actions take beside each other.

    Forwards, backwards and the optimizer keep ranks busy. Transfers, gathers and reductions take what they take.
    Raises GraphError: there is no cost for a stage and microbatch.
    """
    columns = program(schedule, costs)
    if all(factor == 1.0 for factor in costs.busy_slowdown):
        return columns
    loads = [_load(ranks, costs.ranks_per_node) for ranks in columns.tracks]
    waiting, at = _dependencies(columns, loads)
    spent = waiting.run(costs.busy_slowdown)
    seconds, each = list(columns.seconds), list(columns.each)
    for i, nodes in enumerate(at):
        if len(nodes) == 1:
            seconds[i], each[i] = spent[nodes[0]], None
        elif nodes:
            own = columns.each[i] or [(0.0, columns.collectives[i])] * len(nodes)
            each[i] = tuple((spent[node], inside) for node, (_, inside) in zip(nodes, own, strict=True))
    optimizers = _Waiting()
    for seconds_alone, load in zip(columns.optimizer, loads, strict=True):
        optimizers.add(seconds_alone, load)
    return replace(columns, seconds=seconds, each=each, optimizer=optimizers.run(costs.busy_slowdown))


def _load(ranks: Iterable[int], ranks_per_node: int) -> Load:
    return tuple(Counter(rank // ranks_per_node if ranks_per_node else 0 for rank in ranks).items())


def _joined(loads: Iterable[Load]) -> Load:
    total: Counter[int] = Counter()
    for load in loads:
        total.update(dict(load))
    return tuple(total.items())


@dataclass
class _Running:
    """Work under way: what is left of it at `since`, in seconds alone, and how much slower it goes."""

    left: float
    since: float
    slow: float = 1.0
    spent: float = 0.0

    @property
    def stop(self) -> float:
        return self.since + self.left * self.slow

    def change(self, now: float, slow: float) -> None:
        """Go on at another speed."""
        if slow != self.slow:
            passed = now - self.since
            self.left, self.spent = max(self.left - passed / self.slow, 0.0), self.spent + passed
            self.since, self.slow = now, slow


@dataclass
class _Waiting:
    """Things to do: of each its seconds alone, what it keeps busy (nothing: it takes its seconds whatever else runs),
    what comes after it, and how many others it waits for."""

    seconds: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def add(self, seconds: float, load: Load = (), before: Collection[int] = ()) -> int:
        """One more; its number."""
        self.seconds.append(seconds)
        self.loads.append(load)
        self.after.append([])
        self.count.append(len(before))
        for other in before:
            self.after[other].append(len(self.seconds) - 1)
        return len(self.seconds) - 1

    def run(self, slowdown: Sequence[float]) -> list[float]:
        """What each takes, if each starts as soon as nothing holds it back."""
        spent, count = list(self.seconds), list(self.count)
        ready = [i for i, waits in enumerate(count) if not waits]
        timed: list[tuple[float, int]] = []  # a heap of ends that nothing changes
        running: dict[int, _Running] = {}
        busy: Counter[int] = Counter()
        now = 0.0
        while ready or timed or running:
            for i in ready:
                if self.loads[i] and self.seconds[i]:
                    running[i] = _Running(self.seconds[i], now)
                    busy.update(dict(self.loads[i]))
                else:
                    heapq.heappush(timed, (now + self.seconds[i], i))
            for i, work in running.items():
                most = max(busy[node] for node, _ in self.loads[i])
                work.change(now, slowdown[min(most, len(slowdown)) - 1])
            now = min([work.stop for work in running.values()] + [stop for stop, _ in timed[:1]])
            over = [i for i, work in running.items() if work.stop <= now]
            for i in over:
                work = running.pop(i)
                spent[i] = work.spent + work.left * work.slow
                busy.subtract(dict(self.loads[i]))
            while timed and timed[0][0] <= now:
                over.append(heapq.heappop(timed)[1])
            ready = []
            for i in over:
                for other in self.after[i]:
                    count[other] -= 1
                    if not count[other]:
                        ready.append(other)
        return spent


def _dependencies(p: Program, loads: Sequence[Load]) -> tuple[_Waiting, list[list[int]]]:
    """What each action waits for, by the rules of `engine`, and the sets of lanes of those that keep ranks busy."""
    waiting, at = _Waiting(), []
    held = [[_joined(loads[track] for track in own) for own in groups] for groups in p.groups]
    tracks = range(len(p.tracks))
    # What a track's next work waits for, what its last work was; of its links and reductions, what was last.
    free: list[frozenset[int]] = [frozenset() for _ in tracks]
    idle, reduced, outgoing = (list(free) for _ in range(3))
    all_incoming = [list(free) for _ in p.sources]
    arrivals: list[list[frozenset[int]]] = [[]] * p.num_routes
    gather = list(p.gather)
    for kind, target, route, seconds, each in zip(p.kinds, p.targets, p.routes, p.seconds, p.each, strict=True):
        nodes: list[int] = []
        if kind == RECEIVE:
            for own, arrival in zip(p.groups[p.destinations[target]], arrivals[route], strict=True):
                for track in own:
                    free[track] |= arrival
        elif kind == TRANSFER:
            arrivals[route], incoming = [], all_incoming[target]
            left: dict[int, frozenset[int]] = {}
            for destinations, sources in zip(p.groups[p.destinations[target]], p.flows[route], strict=True):
                before = [free[track] for track in sources]
                if seconds:
                    before += [outgoing[track] for track in sources] + [incoming[track] for track in destinations]
                if not sources:
                    arrivals[route].append(frozenset())
                    continue
                sent = frozenset([waiting.add(seconds, before=frozenset().union(*before))])
                arrivals[route].append(sent)
                if seconds:
                    _set(incoming, destinations, sent)
                    left |= {track: left.get(track, frozenset()) | sent for track in sources}
            for track, sent in left.items():
                outgoing[track] = sent
        elif kind == REDUCE:
            own = p.stage_tracks[target]
            before = [free[track] | reduced[track] for track in own]
            _set(reduced, own, frozenset([waiting.add(seconds, before=frozenset().union(*before))]))
        else:
            first = kind == FORWARD and gather[target]
            for g, own in enumerate(p.groups[target]):
                before = [free[track] for track in own]
                if first:
                    gathered = waiting.add(gather[target], before=frozenset().union(*(idle[track] for track in own)))
                    before.append(frozenset([gathered]))
                alone = each[g][0] if each else seconds
                nodes.append(waiting.add(alone, held[target][g], frozenset().union(*before)))
                _set(free, own, frozenset(nodes[-1:]))
                _set(idle, own, frozenset(nodes[-1:]))
            if first:
                gather[target] = 0.0
        at.append(nodes)
    return waiting, at


def _set(column: list[frozenset[int]], tracks: Iterable[int], value: frozenset[int]) -> None:
    for track in tracks:
        column[track] = value
