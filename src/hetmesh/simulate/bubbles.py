"""Bubbles: the time in which a rank does not compute, by its cause, and the two lower bounds of a makespan."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hetmesh.simulate.timeline import GATHER, LAYERS, OPTIMIZER, REDUCE, Spans, Timeline

CLASSES = ("dp_gather", "dp_scatter", "pp_warmup", "pp_cooldown", "pp_other", "tp")
"""Classes of bubbles, as in Optimus (arXiv 2408.03505, table 1)."""


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Seconds of one rank; together they are the step.

    Attributes:
        compute: forwards, backwards and the optimizer, without the collectives inside layers.
        dp_gather: parameters are gathered, and nothing is computed.
        dp_scatter: gradients are reduced, and nothing is computed.
        pp_warmup: waiting for the first forward.
        pp_cooldown: after the last backward, waiting for other ranks.
        pp_other: in between: waiting (dependencies, imbalance), and what the runtime itself takes around actions.
        tp: collectives inside layers.
    """

    compute: float = 0.0
    dp_gather: float = 0.0
    dp_scatter: float = 0.0
    pp_warmup: float = 0.0
    pp_cooldown: float = 0.0
    pp_other: float = 0.0
    tp: float = 0.0

    @property
    def idle(self) -> float:
        """Seconds without computation."""
        return sum(getattr(self, name) for name in CLASSES)

    @property
    def fraction(self) -> float:
        """Share of the step without computation; 0 for a step that takes no time."""
        total = self.compute + self.idle
        return self.idle / total if total else 0.0


def bubbles(timeline: Timeline) -> tuple[Bubbles, ...]:
    """Per track. Compute and all classes add up to the makespan."""
    out = []
    for track in range(len(timeline.tracks)):
        codes, starts, stops = _classified(timeline, track)
        seconds = np.bincount(codes, weights=stops - starts, minlength=len(CLASSES)).tolist()
        busy = seconds[_COMPUTE]
        tp = min(timeline.collectives[track], busy)
        gather, scatter, warmup, cooldown, other = seconds[: len(CLASSES) - 1]
        out.append(Bubbles(busy - tp, gather, scatter, warmup, cooldown, other, tp))
    return tuple(out)


def average_bubbles(timeline: Timeline) -> Bubbles:
    """The mean over ranks."""
    tracks = bubbles(timeline)
    sizes = [len(ranks) for ranks in timeline.tracks]
    total = max(sum(sizes), 1)
    seconds = [[getattr(b, f.name) * n for b, n in zip(tracks, sizes, strict=True)] for f in fields(Bubbles)]
    return Bubbles(*(sum(of_tracks) / total for of_tracks in seconds))


def bubble_spans(timeline: Timeline, track: int) -> list[tuple[str, float, float]]:
    """The gaps of one track in order: class, start, stop. Collectives inside layers are no gaps."""
    codes, starts, stops = (column.tolist() for column in _classified(timeline, track))
    out: list[tuple[str, float, float]] = []
    for code, start, stop in zip(codes, starts, stops, strict=True):
        if code == _COMPUTE:
            continue
        if out and out[-1][0] == CLASSES[code] and out[-1][2] == start:
            out[-1] = (CLASSES[code], out[-1][1], stop)
        else:
            out.append((CLASSES[code], start, stop))
    return out


_COMPUTE = len(CLASSES) - 1  # in the place of tp, which is no interval


def _classified(timeline: Timeline, track: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The elementary intervals between all starts and stops of a track: class, start, stop."""
    spans = timeline.work.select(timeline.work.track == track)
    layers = spans.select(np.isin(spans.kind, LAYERS))
    first = layers.start.min() if len(layers) else timeline.makespan
    last = layers.stop.max() if len(layers) else timeline.makespan
    points = np.unique(np.concatenate([spans.start, spans.stop, [0.0, first, last, timeline.makespan]]))
    starts, stops = points[:-1], points[1:]
    codes = np.full(len(starts), CLASSES.index("pp_other"))
    codes[stops <= first] = CLASSES.index("pp_warmup")
    codes[starts >= last] = CLASSES.index("pp_cooldown")
    for kinds, code in (((REDUCE,), 1), ((GATHER,), 0), ((*LAYERS, OPTIMIZER), _COMPUTE)):
        codes[_covered(starts, spans.select(np.isin(spans.kind, kinds)))] = code
    return codes, starts, stops


def _covered(starts: np.ndarray, spans: Spans) -> np.ndarray:
    """Whether any span covers the elementary interval that begins at each of `starts`."""
    begun = np.searchsorted(np.sort(spans.start), starts, side="right")
    over = np.searchsorted(np.sort(spans.stop), starts, side="right")
    return begun > over
