"""Ranks of one node that compute at the same time slow each other down: how much longer each action takes.

Processor sharing: with k ranks of its node computing, an action goes on at 1 / slowdown(k) of its speed alone, and the
rate changes whenever an action on the node starts or stops. A walk over the order, with sets of actions for times, says
what each action waits for, and an event loop over these finds the seconds of each; `engine` then walks over the order
with them, as it does without any slowdown.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hetmesh.cost.step_costs import StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.program import Program, Run, program
from hetmesh.simulate.timeline import LAYERS

Load = Counter[int]
"""Of nodes of the machine how many of their ranks are busy."""


def slowed_program(schedule: Schedule, costs: StepCosts) -> Program:
    """The columns of `schedule` under `costs`, with the seconds that actions take beside each other.

    Forwards, backwards and the optimizer keep ranks busy. Transfers, gathers and reductions take what they take.
    Raises GraphError: there is no cost for a stage and microbatch.
    """
    columns = program(schedule, costs)
    if all(factor == 1.0 for factor in costs.busy_slowdown):
        return columns
    loads = [_load(ranks, costs.ranks_per_node) for ranks in columns.tracks]
    waiting = _Waiting()
    run = Run(columns, _latest, _Moment(waiting, frozenset()))
    run.actions()
    tracks, kinds, _, _, _, stops, _ = run.work
    numbers: dict[int, None] = {}  # of forwards and backwards, in their order, of each by sets of lanes
    for track, kind, stop in zip(tracks, kinds, stops, strict=True):
        if kind in LAYERS:
            (number,) = stop.after
            numbers[number] = None
            waiting.loads[number].update(loads[track])
    spent = waiting.run(costs.busy_slowdown)
    took = iter(spent[number] for number in numbers)
    seconds, each = list(columns.seconds), list(columns.each)
    for i, (kind, target) in enumerate(zip(columns.kinds, columns.targets, strict=True)):
        if kind in LAYERS:
            own = columns.each[i] or [(0.0, columns.collectives[i])] * len(columns.groups[target])
            each[i] = slow = tuple((next(took), inside) for _, inside in own)
            if len(slow) == 1:
                seconds[i], each[i] = slow[0][0], None
    optimizers = _Waiting()
    for seconds_alone, load in zip(columns.optimizer, loads, strict=True):
        optimizers.loads[optimizers.add(seconds_alone)] = load
    return replace(columns, seconds=seconds, each=each, optimizer=optimizers.run(costs.busy_slowdown))


def _load(ranks: Iterable[int], ranks_per_node: int) -> Load:
    return Counter(rank // ranks_per_node if ranks_per_node else 0 for rank in ranks)


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

    def add(self, seconds: float, before: Collection[int] = ()) -> int:
        """One more; its number."""
        self.seconds.append(seconds)
        self.loads.append(Counter())
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
                    busy.update(self.loads[i])
                else:
                    heapq.heappush(timed, (now + self.seconds[i], i))
            for i, work in running.items():
                most = max(busy[node] for node in self.loads[i])
                work.change(now, slowdown[min(most, len(slowdown)) - 1])
            now = min([work.stop for work in running.values()] + [stop for stop, _ in timed[:1]])
            over = [i for i, work in running.items() if work.stop <= now]
            for i in over:
                work = running.pop(i)
                spent[i] = work.spent + work.left * work.slow
                busy.subtract(self.loads[i])
            while timed and timed[0][0] <= now:
                over.append(heapq.heappop(timed)[1])
            ready = []
            for i in over:
                for other in self.after[i]:
                    count[other] -= 1
                    if not count[other]:
                        ready.append(other)
        return spent


@dataclass(frozen=True)
class _Moment:
    """When all of `after`, of what `waiting` has, is over."""

    waiting: _Waiting
    after: frozenset[int]

    def __add__(self, seconds: float) -> _Moment:
        return _Moment(self.waiting, frozenset([self.waiting.add(seconds, self.after)]))


def _latest(moments: Sequence[_Moment]) -> _Moment:
    return _Moment(moments[0].waiting, frozenset().union(*(moment.after for moment in moments)))
