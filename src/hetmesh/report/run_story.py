"""What became of a run beside its steps: its starts, checkpoints and ends, and whether it still lives."""

from __future__ import annotations

import socket
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetmesh.records.dump_folder import METRICS_FILE
from hetmesh.records.events import ENDED, SAVED, STARTED, is_writing, now
from hetmesh.report.run_lines import Line
from hetmesh.report.run_series import at, number


@dataclass(frozen=True)
class Start:
    """One of the times that a run was started.

    Attributes:
        step: it went on behind this one; 0: it began anew.
        began, until: its first and last sign of life, seconds since 1970.
        last: the last step of which it is known that it was done.
        wanted: steps of the whole run, as it was asked for then; 0: not known.
        host, ranks, device: where it ran, on how many, on what; empty or 0: not known.
        changed: of its recipe, since the checkpoint.
        first_s: seconds until its first step began; None: not known.
        redone, redone_s: its last steps that the next start did again, and seconds that they took.
        how: it ended, a word of `run_events`; empty: nothing says so.
        reason: of that end.
    """

    step: int
    began: float
    until: float
    last: int
    wanted: int = 0
    host: str = ""
    ranks: int = 0
    device: str = ""
    changed: str = ""
    first_s: float | None = None
    redone: int = 0
    redone_s: float = 0.0
    how: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Kept:
    """A checkpoint that was complete.

    Attributes:
        step: after so many.
        timestamp: when it was, seconds since 1970.
        held_s, time_s: seconds that training stood still for it, and that it took.
        asynchronous: it was written beside training.
    """

    step: int
    timestamp: float
    held_s: float
    time_s: float
    asynchronous: bool


@dataclass(frozen=True)
class RunStory:
    """What became of a run.

    Attributes:
        starts, saved: in their order; none of a run that wrote no events.jsonl.
        seen: its last sign of life, seconds since 1970; 0: not known.
        read: when this was read.
        writing: a process has the run's folder (`run_events.is_writing`).
        here: the last start was on this host.
    """

    starts: tuple[Start, ...] = ()
    saved: tuple[Kept, ...] = ()
    seen: float = 0.0
    read: float = 0.0
    writing: bool | None = None
    here: bool = False

    @property
    def resumed(self) -> tuple[int, ...]:
        """Steps behind which the run went on after an end."""
        return tuple(start.step for start in self.starts[1:])


def run_story(events: Sequence[Line], lines: Iterable[Line], folder: Path) -> RunStory:
    """From events and metrics.

    Args:
        events: of `run_lines.event_lines`.
        lines: of metrics.jsonl.
        folder: the run's, to look whether somebody writes there.
    """
    stamps = [(stamp, line) for line in lines if (stamp := number(line.get("timestamp"))) is not None]
    stamps.sort(key=lambda each: each[0])
    begins = [i for i, event in enumerate(events) if event["event"] == STARTED]
    starts: list[Start] = []
    for place, i in enumerate(begins):
        own = events[i : begins[place + 1] if place + 1 < len(begins) else None]
        after = events[begins[place + 1]] if place + 1 < len(begins) else None
        limits = (own[0]["timestamp"], after["timestamp"] if after else float("inf"))
        first, stop = (bisect_left(stamps, limit, key=lambda each: each[0]) for limit in limits)
        starts.append(_start(own, after, stamps[first:stop]))
    seen = max([start.until for start in starts] + [stamp for stamp, _ in stamps[-1:]], default=0.0)
    return RunStory(
        tuple(starts),
        tuple(_kept(event) for event in events if event["event"] == SAVED),
        seen or _changed(folder / METRICS_FILE),
        now(),
        is_writing(folder),
        bool(starts) and starts[-1].host == socket.gethostname(),
    )


def _start(events: Sequence[Line], after: Line | None, lines: Sequence[tuple[float, Line]]) -> Start:
    """Of its events, the first of the next start, and its lines of metrics with their times."""
    first, redone = events[0], at(after, "redone")
    lost_at, lost = number(at(redone, "timestamp")), at(redone, "last")
    signs = [event["timestamp"] for event in events] + [stamp for stamp, _ in lines[-1:]]
    steps = [each["step"] for each in (*events, *(line for _, line in lines[-1:]))]
    found = Start(
        step=first["step"],
        began=first["timestamp"] - (number(first.get("built_s")) or 0.0),
        until=max(signs + ([lost_at] if lost_at is not None else [])),
        last=max(steps + ([lost] if type(lost) is int else [])),
        wanted=_count(first.get("steps")),
        host=_word(first.get("host")),
        ranks=_count(first.get("ranks")),
        device=_word(first.get("device")),
        changed=_word(first.get("changed")),
    )
    timed = [(stamp, seconds) for stamp, line in lines if (seconds := number(line.get("time_s"))) is not None]
    if timed:  # of a start whose steps were all done again none is left
        found = replace(found, first_s=max(0.0, timed[0][0] - timed[0][1] - found.began))
    if after is not None and type(lost) is int:
        found = replace(found, redone=lost - after["step"], redone_s=number(at(redone, "seconds")) or 0.0)
    if (end := events[-1])["event"] == ENDED:
        found = replace(found, how=_word(end.get("how")), reason=_word(end.get("reason")))
    return found


def _kept(event: Line) -> Kept:
    held, whole = (number(event.get(key)) or 0.0 for key in ("held_s", "time_s"))
    return Kept(event["step"], event["timestamp"], held, whole, event.get("asynchronous") is True)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
