"""One pass of `bubble_fill`: a total order in which fillers lie in the gaps of the LLM, for a wanted makespan.

The order is built action by action, and time runs on each track as it is built. A filler that many tracks run, as the
lanes of an encoder over all stages of the LLM do, has one place in the total order: a *cut* through the LLM's actions,
those of a track before it and those after it. Early ranks of a pipeline have their gaps late and late ranks early, so
the LLM's actions go on only where the filler does not fit yet: that finds the first cut in which it fits.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetmesh.errors import ScheduleError
from hetmesh.schedule.fill_problem import FillProblem


@dataclass(frozen=True, eq=False)
class Filled:
    """What a pass found: the order by numbers of actions, when its last track is done, and the most microbatches that
    each stage of a filler holds."""

    order: tuple[int, ...]
    makespan: float
    held: tuple[int, ...]


def lazy(problem: FillProblem) -> Filled:
    """Fillers run when the LLM's module needs them, backwards as soon as they can: no valid order holds less."""
    return _Pass(problem, None, lambda i, _: i >= problem.backwards).run()


def coarse(problem: FillProblem, caps: Sequence[int | None]) -> Filled:
    """Forwards of fillers first, as many as caps allow, and backwards last, except those that make room for others."""
    return _Pass(problem, caps, lambda i, _: i < problem.backwards).run()


def late(problem: FillProblem, caps: Sequence[int | None], rounds: int = 0) -> Filled:
    """Fillers as late as they can be: forwards when the LLM's module needs them, backwards when caps ask for them, or
    last. Whatever may begin before its place then has the longest time to.

    Args:
        rounds: how many rounds of microbatches forwards come in, each as in `coarse` when the LLM's module needs the
            first of it, so that pipelines of fillers fill; 0: one by one.
    """
    if not rounds:
        return _Pass(problem, caps, lambda *_: False).run()
    count = Counter(problem.stage[problem.fixed : problem.backwards])
    forwards = range(problem.fixed, problem.backwards)
    number = {i: problem.actions[i].microbatch * rounds // count[problem.stage[i]] for i in forwards}
    members = [[i for i in forwards if number[i] == r] for r in range(rounds)]

    def begun(i: int, run: _Pass) -> bool:
        return i in number and any(run.stops[other] is not None for other in members[number[i]])

    return _Pass(problem, caps, begun).run()


def fill(problem: FillProblem, caps: Sequence[int | None], tails: Tails, makespan: float, ahead: bool) -> Filled:
    """Fillers as early as nothing of the LLM's module starts later than `makespan` allows.

    Args:
        caps: per stage, how many microbatches it may hold.
        tails: see `longest_tails`.
        ahead: whether the LLM's actions go on only on tracks where a filler does not fit yet. That makes best use of
            gaps; where the LLM's ranks are busy anyway, their own order in time wastes less.
    """
    place_of = [{track: p for p, tracks in enumerate(groups) for track in tracks} for groups in problem.groups]
    following = [
        [tails[i][place_of[i][track]] for i in sequence] + [0.0] for track, sequence in enumerate(problem.sequences)
    ]

    def fits(i: int, run: _Pass) -> bool:
        own = zip(problem.groups[i], run.starts(i), problem.seconds[i], tails[i], strict=True)
        for tracks, start, seconds, tail in own:
            if start + tail >= run.limit:
                return True  # waiting would only make the step longer
            stop = start + seconds
            for track in tracks:
                if stop + following[track][run.position[track]] > run.limit:
                    run.blocked = track
                    return False
        return True

    return _Pass(problem, caps, fits, tails, makespan, ahead).run()


Tails = Sequence[tuple[float, ...]]
"""Per action and set of its tracks, seconds."""


def longest_tails(problem: FillProblem, order: Sequence[int]) -> Tails:
    """Per action and set of its tracks the seconds from its start there to the end of the step, if fillers take no time
    of tracks: makespan minus these are latest starts (the ALAP pass of Optimus, arXiv 2408.03505, section 4.3).
    `order`: any valid one."""
    groups = problem.groups
    after = [[0.0] * len(group) for group in groups]
    tails: list[tuple[float, ...]] = [()] * len(groups)
    for i in reversed(order):
        tails[i] = tail = tuple(map(sum, zip(problem.seconds[i], after[i], strict=True)))
        for other, needed in problem.before[i]:
            earlier = after[other]
            for place, seconds in enumerate(tail):
                for group in range(len(earlier)) if needed is None else needed[place]:
                    earlier[group] = max(earlier[group], seconds)
        for other in problem.previous[i]:
            same = groups[other] == groups[i]
            after[other] = [max(own, tail[p] if same else max(tail)) for p, own in enumerate(after[other])]
    return tails


class _Pass:
    """The state: what is in the order, when tracks are free, what stages hold."""

    def __init__(
        self,
        problem: FillProblem,
        caps: Sequence[int | None] | None,
        fits: Callable[[int, _Pass], bool],
        tails: Tails = (),
        limit: float = 0.0,
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self.problem, self.caps, self.fits = problem, caps or [None] * len(problem.stages), fits
        self.tails, self.limit = tails, limit
        count = len(problem.actions)
        self.free = [0.0] * len(problem.sequences)
        self.position = [0] * len(problem.sequences)  # of each track's next action of the LLM
        self.stops: list[tuple[float, ...] | None] = [None] * count
        self.order: list[int] = []
        self.held, self.most = [0] * len(problem.stages), [0] * len(problem.stages)
        self.holding: dict[int, list[int]] = {}  # forward of a filler -> what has yet to come before it is let go
        self.waiting = [len(problem.before[i]) + len(problem.previous[i]) for i in range(count)]
        self.users: list[list[int]] = [[] for _ in range(count)]
        self.lets_go: list[list[int]] = [[] for _ in range(count)]
        for i in range(count):
            for other, _ in problem.before[i]:
                self.users[other].append(i)
            for other in problem.previous[i]:
                self.users[other].append(i)
        for i, ends in problem.ends.items():
            for end in ends:
                self.lets_go[end].append(i)
        self.ready = [i for i in range(problem.fixed, count) if not self.waiting[i]]  # fillers, by number
        self.blocked: int | None = None
        self.path: dict[int, None] = {}  # from a goal to what has to come first

    def run(self) -> Filled:
        """Until everything is in the order. Raises ScheduleError: a stage may not hold as many microbatches as the
        order of the LLM's module needs."""
        problem, count = self.problem, len(self.problem.actions)
        following, wanted = 0, problem.backwards
        while len(self.order) < count:
            goal, fitting = self._choose()
            if fitting is not None:
                self._commit(fitting)
                continue
            while following < problem.fixed and self.stops[following] is not None:
                following += 1
            while wanted < count and not self.waiting[wanted]:
                wanted += 1
            if following == problem.fixed:  # only fillers are left
                self._commit(self._first_of([i for i in self.ready if not self._full(i)]))
            elif self.ahead and goal is not None:
                self._commit(self._first_towards(goal))
            else:
                first = self._first_towards(wanted) if self.ahead and wanted < count else problem.fixed
                self._commit(first if first < problem.fixed else self._first_towards(following))
        return Filled(tuple(self.order), max(self.free, default=0.0), tuple(self.most))

    def starts(self, i: int) -> list[float]:
        """When a ready action can start, by its sets of tracks."""
        free, out = self.free, []
        for place, tracks in enumerate(self.problem.groups[i]):
            start = max([free[t] for t in tracks])
            for other, needed in self.problem.before[i]:
                stops = self.stops[other]
                assert stops is not None
                for stop in stops if needed is None else [stops[group] for group in needed[place]]:
                    if stop > start:
                        start = stop
            out.append(start)
        return out

    def _choose(self) -> tuple[int | None, int | None]:
        """The filler that can start first of those that fit: by number, where stages take turns on ranks, these would
        wait for a microbatch to come round before they begin the next one. Where none fits, the next action of the LLM
        on the track where the first one does not."""
        goal = None
        fitting: list[int] = []
        for i in self.ready:
            if self._full(i):
                continue
            self.blocked = None
            if self.fits(i, self):
                fitting.append(i)
            elif goal is None and self.blocked is not None:
                sequence = self.problem.sequences[self.blocked]
                position = self.position[self.blocked]
                goal = sequence[position] if position < len(sequence) else None
        return goal, self._first_of(fitting) if fitting else None

    def _first_of(self, some: Sequence[int]) -> int:
        return min(some, key=lambda i: (max(self.starts(i)), i))

    def _full(self, i: int) -> bool:
        if i >= self.problem.backwards:
            return False
        stage = self.problem.stage[i]
        cap = self.caps[stage]
        return cap is not None and self.held[stage] >= cap

    def _first_towards(self, goal: int) -> int:
        """What has to come first for `goal` to come at all."""
        path = self.path
        if next(iter(path), None) != goal:
            path.clear()
            path[goal] = None
        while self.stops[i := next(reversed(path))] is not None:  # of the same goal before, and done since
            path.popitem()
        while (blocker := self._blocker(i)) is not None:
            if blocker in path:
                stage = self.problem.stages[self.problem.stage[i]]
                raise ScheduleError(f"schedule: stage {stage} may hold too few microbatches for this order")
            path[blocker] = None
            i = blocker
        return i

    def _blocker(self, i: int) -> int | None:
        stops = self.stops
        if self.waiting[i]:
            for other in self.problem.previous[i]:
                if stops[other] is None:
                    return other
            return next(other for other, _ in self.problem.before[i] if stops[other] is None)
        if i >= self.problem.fixed and self._full(i):
            stage = self.problem.stage[i]
            held = [ends for j, ends in self.holding.items() if self.problem.stage[j] == stage]
            return min(held, key=max)[0]  # not of the oldest: backwards may come in another order
        return None

    def _commit(self, i: int) -> None:
        problem = self.problem
        stops = []
        for place, (tracks, start) in enumerate(zip(problem.groups[i], self.starts(i), strict=True)):
            stop = start + problem.seconds[i][place]
            if self.tails:  # what cannot be had is not the aim
                self.limit = max(self.limit, start + self.tails[i][place])
            for track in tracks:
                self.free[track] = stop
                self.position[track] += i < problem.fixed
            stops.append(stop)
        self.stops[i] = tuple(stops)
        self.order.append(i)
        if i >= problem.fixed:
            self.ready.remove(i)
            if i < problem.backwards and problem.ends[i]:
                stage = problem.stage[i]
                self.holding[i] = list(problem.ends[i])
                self.held[stage] += 1
                self.most[stage] = max(self.most[stage], self.held[stage])
        for held in self.lets_go[i]:
            self.holding[held].remove(i)
            if not self.holding[held]:
                del self.holding[held]
                self.held[problem.stage[held]] -= 1
        for user in self.users[i]:
            self.waiting[user] -= 1
            if not self.waiting[user] and user >= problem.fixed:
                insort(self.ready, user)
