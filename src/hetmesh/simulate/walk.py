"""One pass over the order of a program: when each action starts on each track."""

from __future__ import annotations

from hetmesh.simulate.program import RECEIVE, Program
from hetmesh.simulate.timeline import FORWARD, GATHER, OPTIMIZER, REDUCE, TRANSFER


class Run:
    """The state of a simulation: when tracks and links are free, when transfers arrived, and the spans so far."""

    def __init__(self, columns: Program, overlap: bool) -> None:
        self.columns, self.overlap = columns, overlap
        tracks = len(columns.tracks)
        self.free = [0.0] * tracks  # when a track can go on, waits included
        self.idle = [0.0] * tracks  # when its last work ended
        self.reduced = [0.0] * tracks
        self.outgoing = [0.0] * tracks
        self.incoming = [[0.0] * tracks for _ in columns.sources]  # per edge
        self.collectives, self.hidden = [0.0] * tracks, [0.0] * tracks
        self.work: tuple[list[float], ...] = ([], [], [], [], [], [], [])
        self.transfers: tuple[list[float], ...] = ([], [], [], [], [], [], [])
        self.end = 0.0

    def actions(self) -> None:
        c, free, idle = self.columns, self.free, self.idle
        all_groups, destinations, inside = c.groups, c.destinations, self.collectives
        overlap, gather = self.overlap, list(c.gather)
        arrivals: list[list[float]] = [[]] * c.num_routes
        track_append, kind_append, target_append, microbatch_append, start_append, stop_append, to_append = (
            column.append for column in self.work
        )
        for kind, target, m, to, route, seconds, collectives, each in zip(
            c.kinds, c.targets, c.microbatches, c.to, c.routes, c.seconds, c.collectives, c.each, strict=True
        ):
            if kind == RECEIVE:
                for tracks, arrival in zip(all_groups[destinations[target]], arrivals[route], strict=True):
                    for track in tracks:
                        if free[track] < arrival:
                            free[track] = arrival
            elif kind == TRANSFER:
                transfer = self._linked if overlap else self._blocking
                arrivals[route] = transfer(target, m, to, seconds, c.flows[route])
            elif kind == REDUCE:
                self._reduce(target, seconds)
            else:
                if kind == FORWARD and gather[target]:
                    self._gather(target)
                    gather[target] = 0.0
                for group, tracks in enumerate(all_groups[target]):
                    if each is not None:
                        seconds, collectives = each[group]
                    start = free[tracks[0]]
                    if len(tracks) > 1:
                        start = max([free[track] for track in tracks])
                    stop = start + seconds
                    for track in tracks:
                        free[track] = idle[track] = stop
                        inside[track] += collectives
                        track_append(track)
                        kind_append(kind)
                        target_append(target)
                        microbatch_append(m)
                        start_append(start)
                        stop_append(stop)
                        to_append(to)

    def optimizer(self) -> None:
        """What follows the last action; sets `end`."""
        ready = max([*self.free, *self.reduced, *self.outgoing], default=0.0)  # what leaves last arrives last
        for track, seconds in enumerate(self.columns.optimizer):
            if seconds:
                self._span(track, OPTIMIZER, -1, -1, ready, ready + seconds)
        self.end = ready + max(self.columns.optimizer, default=0.0)

    def _linked(self, edge: int, m: int, to: int, seconds: float, flows: tuple[tuple[int, ...], ...]) -> list[float]:
        """A transfer on links of its own; its arrival at each set of lanes. What a track sends to several of them
        leaves together: the seconds are those of the rank that sends or receives most."""
        free, incoming = self.free, self.incoming[edge]
        if not seconds:
            return [max([free[track] for track in sources], default=0.0) for sources in flows]
        left: dict[int, float] = {}
        arrivals = []
        for tracks, sources in zip(self.columns.groups[self.columns.destinations[edge]], flows, strict=True):
            if not sources:
                arrivals.append(0.0)
                continue
            start = max([free[track] for track in sources])
            for track in sources:
                if self.outgoing[track] > start:
                    start = self.outgoing[track]
            for track in tracks:
                if incoming[track] > start:
                    start = incoming[track]
            stop = start + seconds
            for track in sources:
                left[track] = max(stop, left.get(track, 0.0))
            for track in tracks:
                incoming[track] = stop
                self._transfer(track, edge, m, to, start, stop)
            arrivals.append(stop)
        for track, stop in left.items():
            self.outgoing[track] = stop
        return arrivals

    def _blocking(self, edge: int, m: int, to: int, seconds: float, flows: tuple[tuple[int, ...], ...]) -> list[float]:
        """A transfer for which both sides stop; its arrival at each set of lanes."""
        free = self.free
        if not seconds:
            return [max([free[track] for track in sources], default=0.0) for sources in flows]
        until: dict[int, float] = {}
        arrivals = []
        for tracks, sources in zip(self.columns.groups[self.columns.destinations[edge]], flows, strict=True):
            if not sources:
                arrivals.append(0.0)
                continue
            both = {*sources, *tracks}
            stop = max(free[track] for track in both) + seconds
            until |= {track: max(stop, until.get(track, 0.0)) for track in both}
            for track in tracks:
                self._transfer(track, edge, m, to, stop - seconds, stop)
            arrivals.append(stop)
        for track, stop in until.items():
            free[track] = self.idle[track] = stop
        return arrivals

    def _gather(self, stage: int) -> None:
        for tracks in self.columns.groups[stage]:
            start = max(self.idle[track] for track in tracks)
            stop = start + self.columns.gather[stage]
            for track in tracks:
                self.idle[track] = stop
                self.free[track] = max(self.free[track], stop)
                self._span(track, GATHER, stage, -1, start, stop)

    def _reduce(self, stage: int, seconds: float) -> None:
        tracks = self.columns.stage_tracks[stage]
        start = max(max(self.free[track], self.reduced[track]) for track in tracks)
        for track in tracks:
            self.reduced[track] = start + seconds
            self._span(track, REDUCE, stage, -1, start, start + seconds)

    def _span(self, track: int, kind: int, target: int, m: int, start: float, stop: float) -> None:
        for column, value in zip(self.work, (track, kind, target, m, start, stop, m), strict=True):
            column.append(value)

    def _transfer(self, track: int, edge: int, m: int, to: int, start: float, stop: float) -> None:
        target = len(self.columns.stage_tracks) + edge
        for column, value in zip(self.transfers, (track, TRANSFER, target, m, start, stop, to), strict=True):
            column.append(value)
