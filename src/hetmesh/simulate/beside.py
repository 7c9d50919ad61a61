"""Encoder kernels beside collectives of the LLM: what a step would take if they shared a rank.

While an LLM layer waits for a sum over its tensor parallel ranks, the rank's processors have nothing to do (Optimus,
arXiv 2408.03505, section 4.2). Here the actions of some modules run on a second stream of their ranks, in the
schedule's order: their computation in the collectives of other actions and where a rank is idle, their own collectives,
each as a whole, beside the computation of other actions and where a rank is idle. Other actions never wait for a
stream but for rows that it has yet to make: then what is missing runs on its rank alone.

Where a schedule says so (`Schedule.in_collectives`) an action of a stream is over at its place, as in a real run: what
collectives did not hide of it runs there, on its rank alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from hetmesh.cost import Parts, StepCosts
from hetmesh.cost.step_costs import COLLECTIVE, EXCHANGE
from hetmesh.errors import GraphError
from hetmesh.schedule import Action, Kind, Schedule
from hetmesh.schedule.windows import room_after
from hetmesh.simulate.action_parts import MATRICES
from hetmesh.simulate.program import RECEIVE, Program, Run
from hetmesh.simulate.timeline import FORWARD, REDUCE, TRANSFER

_IDLE, _COMPUTING, _COMMUNICATING, _CLOSED = range(4)
_HOSTS = {False: (_IDLE, _COMMUNICATING), True: (_IDLE, _COMPUTING)}  # of computation, of collectives


@dataclass(eq=False)
class _Work:
    """An action of a stream on one track."""

    track: int
    kind: int
    target: int
    microbatch: int
    parts: list[tuple[bool, float, float]]  # (whether it is a collective, seconds, those between two stops)
    after: list[float | _Arrival] = field(default_factory=list)
    stop: float | None = None


@dataclass(eq=False)
class _Arrival:
    """What starts a number of seconds after some work is over."""

    work: list[_Work]
    seconds: float
    edge: int
    microbatch: int
    to: int
    tracks: tuple[int, ...]
    time: float | None = None


class _Past:
    """What a track did: runs of one kind, from 0 on, without gaps; and how far the stream has used it. Each collective
    in which it computes costs it `hand_over` seconds first; if any, it is a thread, and leaves idle time alone."""

    def __init__(self, hand_over: float) -> None:
        self.hand_over = hand_over
        self.hosts = {**_HOSTS, False: (_COMMUNICATING,)} if hand_over else _HOSTS
        self.stops: list[float] = []
        self.kinds: list[int] = []
        self.place, self.now, self.entered = 0, 0.0, -1

    def add(self, kind: int, stop: float) -> None:
        if stop <= (self.stops[-1] if self.stops else 0.0):
            return
        if self.kinds and self.kinds[-1] == kind and self.place < len(self.kinds):
            self.stops[-1] = stop
        else:
            self.kinds.append(kind)
            self.stops.append(stop)

    def spend(self, collective: bool, seconds: float, piece: float) -> Iterator[tuple[int, float, float]]:
        """Use what is left for computation, in pieces, or for a collective as a whole: kind of the run, start, stop. A
        thread goes on to its next stop, every `piece` seconds, when a collective is over: then the kind is _CLOSED."""
        whole = seconds
        while seconds > 0.0 and self.place < len(self.stops):
            kind, stop = self.kinds[self.place], self.stops[self.place]
            if kind == _COMMUNICATING and not collective and self.place > self.entered:
                self.now, self.entered = min(self.now + self.hand_over, stop), self.place
            room = stop - self.now
            if kind in self.hosts[collective] and room > 0.0 and (not collective or room >= seconds):
                used = min(room, seconds)
                yield kind, self.now, self.now + used
                self.now, seconds = self.now + used, seconds - used
                if kind == _COMMUNICATING and self.hand_over and seconds > 0.0:
                    done = whole - seconds
                    over = min(max(piece * math.ceil(done / piece - 1e-9) - done, 0.0), seconds)
                    seconds -= over
                    yield _CLOSED, stop, stop + over
            if seconds > 0.0 or self.now >= stop:
                self.now = max(self.now, stop)
                self.place += 1

    def skip(self, until: float) -> None:
        """Nothing before `until` is used."""
        self.now = max(self.now, until)
        while self.place < len(self.stops) and self.stops[self.place] <= self.now:
            self.place += 1


class BesideRun(Run):
    """A simulation in which the actions of some modules run beside those of others."""

    def __init__(self, columns: Program, schedule: Schedule, costs: StepCosts, modules: Collection[str]) -> None:
        super().__init__(columns)
        stages = schedule.stages.stages
        self.schedule, self.costs = schedule, costs
        self.beside = [stage.module in modules for stage in stages]
        if schedule.stages.llm.module in modules:
            raise GraphError(f"{schedule.stages.llm.module!r} cannot run beside itself: it is what others run beside")
        if missing := [str(s) for s in stages if (s, 0) not in costs.parts and schedule.routes.count(s.module)]:
            raise GraphError(f"what runs beside others needs the parts of actions: none for {missing[:4]}")
        self.room: dict[int, list[int]] = {}  # behind an action, the forwards that may then begin
        self.opened: dict[int, list[float]] = {}  # when that is, on each track
        if schedule.in_collectives:
            place = {action: i for i, action in enumerate(schedule.actions)}
            for forward, behind in room_after(schedule, place).items():
                self.room.setdefault(behind, []).append(place[forward])
        self.past = [_Past(costs.hand_over) for _ in columns.tracks]
        self.queue: list[deque[_Work]] = [deque() for _ in columns.tracks]
        self.done: dict[tuple[int, int, bool], list[_Work]] = {}
        self.after: dict[tuple[int, int, bool], list[list[float | _Arrival]]] = {}

    def actions(self) -> None:
        c = self.columns
        arrivals: list[Sequence[float | _Arrival]] = [()] * c.num_routes
        reductions: list[tuple[int, float]] = []
        forward_edges, gather = len(c.sources) // 2, list(c.gather)
        for i, (kind, target, m, to, route, seconds) in enumerate(
            zip(c.kinds, c.targets, c.microbatches, c.to, c.routes, c.seconds, strict=True)
        ):
            if kind == RECEIVE:
                stage, forward = c.destinations[target], target < forward_edges
                if self.beside[stage]:
                    waiting = self.after.setdefault((stage, to, forward), [[] for _ in c.groups[stage]])
                    for some, arrival in zip(waiting, arrivals[route], strict=True):
                        some.append(arrival)
                    continue
                for tracks, arrival in zip(c.groups[stage], arrivals[route], strict=True):
                    time = self._time(arrival)
                    for track in tracks:
                        self.free[track] = max(self.free[track], time)
            elif kind == TRANSFER:
                if not self.beside[c.sources[target]]:
                    arrivals[route] = self._linked(target, m, to, seconds, c.flows[route])
                    continue
                made = self.done[c.sources[target], m, target < forward_edges]
                arrivals[route] = [
                    _Arrival([w for w in made if w.track in sources], seconds, target, m, to, tracks)
                    for tracks, sources in zip(c.groups[c.destinations[target]], c.flows[route], strict=True)
                ]
            elif kind == REDUCE:
                if self.beside[target]:
                    reductions.append((target, seconds))
                else:
                    self._reduce(target, seconds)
            else:
                if kind == FORWARD and gather[target]:
                    for track in c.stage_tracks[target] if self.beside[target] else ():
                        self._catch_up(track)
                    self._gather(target)
                    gather[target] = 0.0
                (self._stream if self.beside[target] else self._alone)(i)
                for track in c.stage_tracks[target] if self.beside[target] and self.schedule.in_collectives else ():
                    self._catch_up(track)
            for forward in self.room.get(i, ()):
                self.opened[forward] = list(self.free)
        for track in range(len(c.tracks)):
            self._catch_up(track)
        for target, seconds in reductions:
            self._reduce_last(target, seconds)

    def _parts(self, i: int, group: int) -> tuple[list[tuple[str, float]], float, float]:
        """Of the i-th action: its parts; its seconds and its collectives."""
        c, action = self.columns, self.schedule.actions[i]
        each = c.each[i]
        seconds, inside = each[group] if each else (c.seconds[i], c.collectives[i])
        parts = _parts_of(self.costs, action)
        whole = sum(part for _, part in parts)
        scale = seconds / whole if whole else 0.0
        return [(kind, scale * part) for kind, part in parts], seconds, inside

    def _alone(self, i: int) -> None:
        """An action that nothing runs beside yet: it keeps its time, and leaves its collectives to others."""
        c = self.columns
        for g, tracks in enumerate(c.groups[c.targets[i]]):
            parts, seconds, inside = self._parts(i, g)
            start = max(self.free[track] for track in tracks)
            for track in tracks:
                past, now = self.past[track], start
                past.add(_IDLE, start)
                for kind, part in parts:
                    now += part
                    open_to = {COLLECTIVE: _COMMUNICATING, EXCHANGE: _CLOSED}.get(kind, _COMPUTING)
                    past.add(open_to, now)
                self.free[track] = self.idle[track] = start + seconds
                self.collectives[track] += inside
                self._span(track, c.kinds[i], c.targets[i], c.microbatches[i], start, start + seconds)

    def _stream(self, i: int) -> None:
        """An action of the streams of its tracks. One that several tracks run together is not taken apart: it waits
        for their streams, and runs alone."""
        c = self.columns
        target, m, forward = c.targets[i], c.microbatches[i], c.kinds[i] == FORWARD
        groups = c.groups[target]
        after = self.after.pop((target, m, forward), [[] for _ in groups])
        before = self.done.get((target, m, True), []) if not forward else []
        made: list[_Work] = self.done.setdefault((target, m, forward), [])
        for g, tracks in enumerate(groups):
            parts, seconds, inside = self._parts(i, g)
            pieces = [(kind == COLLECTIVE, part, part / MATRICES.get(kind, 1)) for kind, part in parts]
            if len(tracks) == 1:
                opened = [self.opened[i][tracks[0]]] if i in self.opened else []
                work = _Work(tracks[0], c.kinds[i], target, m, pieces, [*after[g], *opened])
                self.queue[tracks[0]].append(work)
                made.append(work)
                continue
            for track in tracks:
                self._catch_up(track)
            ready = [self._time(action) for action in after[g]] + [self._finish(w) for w in before if w.track in tracks]
            start = max([self.free[track] for track in tracks] + ready)
            for track in tracks:
                self._block(track, start, start + seconds)
                self.collectives[track] += inside
                self._span(track, c.kinds[i], target, m, start, start + seconds)
                made.append(_Work(track, c.kinds[i], target, m, [], stop=start + seconds))

    def _time(self, arrival: float | _Arrival) -> float:
        """When something is there; what it waits for is brought to its end."""
        if isinstance(arrival, float):
            return arrival
        if arrival.time is None:
            start = max((self._finish(work) for work in arrival.work), default=0.0)
            arrival.time = start + (arrival.seconds if arrival.work else 0.0)
            for track in arrival.tracks if arrival.work and arrival.seconds else ():
                self._transfer(track, arrival.edge, arrival.microbatch, arrival.to, start, arrival.time)
        return arrival.time

    def _finish(self, work: _Work) -> float:
        """When some work is over. What it waits for may wait for other tracks, and so on, as long as a pipeline is: the
        works that are waited for lie on a stack, each above the one that needs it."""
        needed = [work]
        while needed:
            last = needed[-1]
            if last.stop is not None:
                needed.pop()
                continue
            queue = self.queue[last.track]
            missing = self._missing(queue[0])
            if missing is not None:
                needed.append(missing)
                continue
            self._complete(queue[0])
            queue.popleft()
        assert work.stop is not None
        return work.stop

    def _missing(self, work: _Work) -> _Work | None:
        """The first work that must be over before all that `work` waits for has a time; None: it may run."""
        for arrival in work.after:
            if isinstance(arrival, _Arrival) and arrival.time is None:
                for before in arrival.work:
                    if before.stop is None:
                        return before
                self._time(arrival)
        return None

    def _catch_up(self, track: int) -> None:
        if self.queue[track]:
            self._finish(self.queue[track][-1])

    def _complete(self, work: _Work) -> None:
        """Run what is first in the stream of a track: in what the track has done so far, and the rest after it."""
        ready = max((self._time(action) for action in work.after), default=0.0)
        track = work.track
        past = self.past[track]
        past.add(_IDLE, self.free[track])
        past.skip(ready)
        for place, (collective, seconds, piece) in enumerate(work.parts):
            left = seconds
            for kind, start, stop in past.spend(collective, seconds, piece):
                left -= stop - start
                if kind == _COMMUNICATING:
                    self.hidden[track] += stop - start
                    self.collectives[track] = max(self.collectives[track] - (stop - start), 0.0)
                    self.side.append((track, work.kind, work.target, work.microbatch, start, stop, work.microbatch))
                elif kind == _IDLE:
                    self.collectives[track] += (stop - start) * collective
                    self._span(track, work.kind, work.target, work.microbatch, start, stop)
                elif kind == _CLOSED:  # all that the track did since is so much later
                    end = self.free[track]
                    self.free[track] = self.idle[track] = end + stop - start
                    past.add(_CLOSED, self.free[track])
                    self._span(track, work.kind, work.target, work.microbatch, end, self.free[track])
            if past.place == len(past.stops) and left > 1e-15:
                later = [(collective, left), *(part[:2] for part in work.parts[place + 1 :])]
                rest = sum(part for _, part in later)
                self.collectives[track] += sum(part for inside, part in later if inside)
                start = max(self.free[track], past.now)
                self._block(track, start, start + rest)
                self._span(track, work.kind, work.target, work.microbatch, start, start + rest)
                work.stop = start + rest
                return
        work.stop = past.now

    def _block(self, track: int, start: float, stop: float) -> None:
        past = self.past[track]
        past.add(_IDLE, start)
        past.add(_CLOSED, stop)
        past.skip(stop)
        self.free[track] = self.idle[track] = stop

    def _reduce_last(self, stage: int, seconds: float) -> None:
        """Sums of a stream's gradients, when all of it is over."""
        tracks = self.columns.stage_tracks[stage]
        stops = [w.stop or 0.0 for (target, _, forward), some in self.done.items() if target == stage for w in some]
        start = max([*stops, *(self.reduced[track] for track in tracks)])
        for track in tracks:
            self.reduced[track] = start + seconds
            self._span(track, REDUCE, stage, -1, start, start + seconds)


def _parts_of(costs: StepCosts, action: Action) -> Parts:
    parts = costs.parts[action.stage, action.microbatch]
    if action.kind is Kind.FORWARD:
        return parts.forward
    if action.kind is Kind.BACKWARD:
        return parts.backward_input + parts.backward_weight
    return parts.backward_weight if action.kind is Kind.BACKWARD_WEIGHT else parts.backward_input
