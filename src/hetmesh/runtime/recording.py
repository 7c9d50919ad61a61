"""When the actions of a step began and ended, by the clock of what ran them: events, read when the step is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hetmesh.boundary.accelerator import Accelerator, Event
from hetmesh.schedule import Action

Recording = list[tuple[Action, float, float]]
"""What a rank did in a step: action, start and stop in seconds of `time.perf_counter`. A REDUCE comes twice: when the
sums begin, and when they are waited for."""


class ActionClock:
    """Times the actions of one step: on the CPU as the host runs them, on an asynchronous accelerator as the device
    does. The host waits for the device before the first action and after the last."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._timed: list[tuple[Action, Event, Event]] = []
        accelerator.synchronize()
        self._zero = self._now()
        self._zero_at = time.perf_counter()

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """The body is `action`, or a part of it, on the current stream."""
        started = self._now()
        yield
        self._timed.append((action, started, self._now()))

    def read(self) -> Recording:
        """What was timed, in order. The host waits for it."""
        self.accelerator.synchronize()
        return [(action, self._seconds(started), self._seconds(stopped)) for action, started, stopped in self._timed]

    def _now(self) -> Event:
        event = self.accelerator.event(timing=True)
        event.record()
        return event

    def _seconds(self, event: Event) -> float:
        return self._zero_at + 1e-3 * self._zero.elapsed_time(event)
