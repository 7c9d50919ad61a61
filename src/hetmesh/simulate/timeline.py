"""Timeline: when each action ran on each rank, simulated or recorded. Spans are columns, so that a million fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from hetmesh.errors import GraphError
from hetmesh.graph import Edge, StageGraph, microbatches_text
from hetmesh.schedule import Action, Kind, Schedule

KINDS = ("F", "B", "I", "W", "REDUCE", "GATHER", "OPTIMIZER", "SEND")
"""Kinds of spans; `Spans.kind` holds indices into it. SEND is a transfer from its start to its arrival."""
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, REDUCE, GATHER, OPTIMIZER, TRANSFER = range(len(KINDS))
LAYERS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

Record = tuple[Action, float, float]
"""An action that a rank took part in, its start and stop in seconds since the step's common zero."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a timeline.

    Attributes:
        kind: one of `KINDS`.
        target: a stage (`"llm.0"`) or, of a transfer, an edge (`"vision.0->llm.0"`); empty for OPTIMIZER.
        microbatch: -1 where the kind comes once per step; of a transfer, that of the stage that sends.
        start, stop: seconds since the step began.
        track: of the timeline, i.e. on which ranks; of a transfer, where it arrives.
        to: of a transfer, the microbatch of the stage that receives; otherwise as `microbatch`.
    """

    kind: str
    target: str
    microbatch: int
    start: float
    stop: float
    track: int
    to: int

    @property
    def name(self) -> str:
        """As an action is written: `"llm.0 F2"`, `"vision.0->llm.0 SEND2>3"`."""
        number = microbatches_text(self.microbatch, self.to) if self.microbatch >= 0 else ""
        return f"{self.target} {self.kind}{number}".strip()


@dataclass(frozen=True, eq=False)
class Spans:
    """Columns of equal length: see `Span`. `kind` and `target` are indices into `KINDS` and `Timeline.targets`."""

    track: np.ndarray
    kind: np.ndarray
    target: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    to: np.ndarray

    @classmethod
    def of(cls, columns: Iterable[Sequence[float]]) -> Spans:
        """From sequences in the order of the attributes. The last may be left out, as in files of older versions: all
        transfers are then between microbatches of the same number."""
        track, kind, target, microbatch, start, stop, *to = columns
        tracks, kinds, targets, microbatches, tos = (
            np.asarray(column, dtype=np.int64) for column in (track, kind, target, microbatch, *(to or [microbatch]))
        )
        starts, stops = (np.asarray(column, dtype=np.float64) for column in (start, stop))
        return cls(tracks, kinds, targets, microbatches, starts, stops, tos)

    def __len__(self) -> int:
        return len(self.track)

    def select(self, chosen: np.ndarray) -> Spans:
        """The spans at some indices, or where a mask is true."""
        return Spans(*(column[chosen] for column in self.columns))

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All columns, in the order of the attributes."""
        return self.track, self.kind, self.target, self.microbatch, self.start, self.stop, self.to


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step.

    Attributes:
        tracks: the ranks of each track (a line of the picture), ascending. Simulated: ranks that hold exactly the same
            stages behave alike and share a track. Recorded: one track per rank.
        holds: per track, the stages that its ranks hold.
        targets: names of stages and edges.
        work: what ranks do themselves; one span per track and action.
        transfers: what travels beside it; one span per receiving track.
        makespan: seconds from the step's begin to the last stop.
        collectives: per track, how many of the seconds of its work are collectives inside layers.
        peak_bytes: per track, of the rank that holds most: static, activations and boundary buffers; 0 where not known.
        hidden: per track, seconds of computation inside collectives of other actions (`simulate(beside=...)`), which
            are then no idle time; empty: none.
        side: this computation, as `work`; None: not known, as where the timeline is from a file.
    """

    tracks: tuple[tuple[int, ...], ...]
    holds: tuple[tuple[str, ...], ...]
    targets: tuple[str, ...]
    work: Spans
    transfers: Spans
    makespan: float
    collectives: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    hidden: tuple[float, ...] = ()
    side: Spans | None = None

    @classmethod
    def recorded(
        cls,
        schedule: Schedule,
        records: Mapping[int, Sequence[Record]],
        *,
        optimizer: Mapping[int, tuple[float, float]] | None = None,
        collectives: Mapping[int, Sequence[tuple[bool, float, float]]] = MappingProxyType({}),
    ) -> Timeline:
        """The timeline of a real step.

        A RECV is a wait, not work: it leaves a gap, and ends the transfer that the first of the sources' SENDs began.
        Gathers in the first forward of a stage are spans of their own, between which it is cut, as the simulator has
        them before it; other collectives stay inside of what they are part of.

        Args:
            records: per rank, what it ran, in seconds since a zero that all ranks share.
            optimizer: per rank, start and stop of what follows the last action (normalising, clipping, the optimizer).
            collectives: per rank, whether parameters are gathered, start and stop of those inside forwards and
                backwards; others are not looked at.

        Raises:
            GraphError: an action does not belong to the schedule, or stops before it starts.
        """
        stages, known = schedule.stages, set(schedule.actions)
        names = target_names(stages)
        index = {name: i for i, name in enumerate(names)}
        held = {rank: indices for ranks, indices in stages.rank_classes() for rank in ranks}
        ranks = sorted(records)
        sent: dict[Action, float] = {}
        for rank in ranks:
            for action, start, stop in records[rank]:
                if action not in known or stop < start:
                    raise GraphError(f"recording of rank {rank}: {action} from {start} to {stop} does not belong to it")
                if action.kind is Kind.SEND and isinstance(action.target, Edge):
                    source = rank in stages.ranks_of(action.target.source)
                    sent[action] = min(start, sent.get(action, start)) if source else sent.get(action, start)
        work: list[tuple[float, ...]] = []
        transfers: list[tuple[float, ...]] = []
        inside = []
        for track, rank in enumerate(ranks):
            gathers, seconds = collectives_inside(records[rank], collectives.get(rank, ()))
            inside.append(seconds)
            for i, (action, start, stop) in enumerate(records[rank]):
                target, m = index[str(action.target)], action.microbatch
                if action.kind in WORK:
                    at = start
                    for began, ended in gathers.get(i, ()):
                        work.append((track, WORK[action.kind], target, m, at, began, m))
                        work.append((track, GATHER, target, -1, began, ended, -1))
                        at = ended
                    work.append((track, WORK[action.kind], target, m, at, stop, m))
                elif action.kind is Kind.RECV:
                    began = min(sent.get(Action(Kind.SEND, action.target, m, action.to), start), stop)
                    transfers.append((track, TRANSFER, target, m, began, stop, action.route.destination))
            if optimizer is not None and rank in optimizer:
                work.append((track, OPTIMIZER, -1, -1, *optimizer[rank], -1))
        worked, moved = (Spans.of(zip(*spans, strict=True) if spans else [()] * 7) for spans in (work, transfers))
        return cls(
            tuple((rank,) for rank in ranks),
            tuple(tuple(names[i] for i in held.get(rank, ())) for rank in ranks),
            names,
            worked,
            moved,
            max((float(some.stop.max()) for some in (worked, moved) if len(some)), default=0.0),
            tuple(inside),
            (0,) * len(ranks),
        )

    def track_of(self, rank: int) -> int:
        """The track of `rank`. Raises GraphError: no stage is on `rank`."""
        if rank not in self._track_of:
            raise GraphError(f"timeline: no work on rank {rank}")
        return self._track_of[rank]

    @cached_property
    def _track_of(self) -> dict[int, int]:
        return {rank: i for i, ranks in enumerate(self.tracks) for rank in ranks}

    @property
    def hidden_share(self) -> float:
        """Of the seconds of collectives inside layers, those in which ranks compute."""
        hidden = sum(self.hidden)
        return hidden / (hidden + sum(self.collectives)) if hidden else 0.0

    def spans(self, track: int | None = None, *, transfers: bool = False, side: bool = False) -> Iterator[Span]:
        """Work, transfers, or what computes in collectives, of one track or of all, as values."""
        columns = self.transfers if transfers else (self.side or Spans.of([()] * 7)) if side else self.work
        if track is not None:
            columns = columns.select(columns.track == track)
        for r, kind, target, m, start, stop, to in zip(*(c.tolist() for c in columns.columns), strict=True):
            yield Span(KINDS[kind], self.targets[target] if target >= 0 else "", m, start, stop, r, to)

    def as_json(self) -> dict[str, Any]:
        """A value for `json.dumps`; `from_json` is its inverse."""
        return {
            "rows": [list(ranks) for ranks in self.tracks],
            "holds": [list(names) for names in self.holds],
            "targets": list(self.targets),
            "work": [column.tolist() for column in self.work.columns],
            "transfers": [column.tolist() for column in self.transfers.columns],
            "makespan": self.makespan,
            "collectives": list(self.collectives),
            "peak_bytes": list(self.peak_bytes),
            "hidden": list(self.hidden),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Timeline:
        """What `as_json` made. Raises GraphError: a part is missing or has another form."""
        try:
            found = cls(
                tuple(tuple(int(rank) for rank in ranks) for ranks in value["rows"]),
                tuple(tuple(map(str, names)) for names in value["holds"]),
                tuple(map(str, value["targets"])),
                Spans.of(value["work"]),
                Spans.of(value["transfers"]),
                float(value["makespan"]),
                tuple(map(float, value["collectives"])),
                tuple(map(int, value["peak_bytes"])),
                tuple(map(float, value.get("hidden", ()))),
            )
            found._check()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise GraphError(f"not a timeline: {type(error).__name__} {error}") from error
        return found

    def _check(self) -> None:
        """Raise ValueError unless columns are of equal length and refer to what is there."""
        tracks = len(self.tracks)
        if not all(self.tracks) or {len(self.holds), len(self.collectives), len(self.peak_bytes)} - {tracks}:
            raise ValueError("tracks, and what is said of each, differ in number")
        held = {name for names in self.holds for name in names}
        for spans in (self.work, self.transfers):
            if any(column.shape != spans.track.shape or column.ndim != 1 for column in spans.columns):
                raise ValueError("columns of spans differ in length")
            bounds = ((spans.track, 0, tracks), (spans.kind, 0, len(KINDS)), (spans.target, -1, len(self.targets)))
            if any(((column < low) | (column >= high)).any() for column, low, high in bounds):
                raise ValueError("a span names a track, kind or target that is not there")
            if not np.isfinite([*spans.start, *spans.stop, self.makespan]).all():
                raise ValueError("times must be finite")
        if unknown := held - set(self.targets):
            raise ValueError(f"a track holds {sorted(unknown)[0]!r}, which is no target")


def collectives_inside(
    records: Sequence[Record], collectives: Sequence[tuple[bool, float, float]]
) -> tuple[dict[int, list[tuple[float, float]]], float]:
    """Of the collectives of one rank, the gathers in the first forward of each of its stages, by its index in
    `records`, and the seconds of the others in forwards and backwards."""
    layers = [(start, stop, i) for i, (action, start, stop) in enumerate(records) if WORK.get(action.kind) in LAYERS]
    first: dict[str, int] = {}
    for _, _, i in layers:
        first.setdefault(str(records[i][0].target), i)
    gathers: dict[int, list[tuple[float, float]]] = {}
    seconds, place = 0.0, 0
    layers.sort()
    for gather, start, stop in sorted(collectives, key=lambda span: span[1]):
        while place < len(layers) and layers[place][1] <= start:
            place += 1
        if place == len(layers) or start < layers[place][0]:
            continue
        _, end, i = layers[place]
        if gather and first[str(records[i][0].target)] == i:
            gathers.setdefault(i, []).append((start, min(stop, end)))
        else:
            seconds += min(stop, end) - start
    return gathers, seconds


def target_names(stages: StageGraph) -> tuple[str, ...]:
    """Stages, forward edges, reversed edges: the order of `Timeline.targets`."""
    edges = stages.edges
    return (*map(str, stages.stages), *map(str, edges), *(str(edge.reversed) for edge in edges))


WORK = {
    Kind.FORWARD: FORWARD,
    Kind.BACKWARD: BACKWARD,
    Kind.BACKWARD_INPUT: BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: BACKWARD_WEIGHT,
    Kind.REDUCE: REDUCE,
}
"""Kinds of actions that are work -> index in `KINDS`."""
