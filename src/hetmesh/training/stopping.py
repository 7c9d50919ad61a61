"""What stops a run after the current step: SIGTERM, SIGINT and SIGHUP (schedulers, people, lost connections), with a
checkpoint; or what the caller of `hetmesh.train` does after each step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hetmesh.boundary import World
from hetmesh.boundary.world import reduce_over_ranks
from hetmesh.records.metrics import StepMetrics

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

OnStep = Callable[[StepMetrics], bool | None]
"""Called on every rank after each step, with equal losses and norms; True, on any rank, ends the run after it."""


def stop_requested(on_step: OnStep | None, metrics: StepMetrics, world: World) -> bool:
    """Call `on_step`; whether any rank's asks to end the run. Collective where there is an `on_step`. Raises TypeError:
    it returns neither None nor a bool."""
    if on_step is None:
        return False
    answer = on_step(metrics)
    if answer is not None and not isinstance(answer, bool):
        raise TypeError(f"on_step must return None, or True to end the run, got {answer!r}")
    return reduce_over_ranks([bool(answer)], world)[0] > 0


class Stopped(SystemExit):
    """A signal has ended a run after a step, on all ranks. Where nobody catches it the process ends with the exit
    status that shells report for the signal: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


class StopSignals:
    """In its body signals are noted and do not end this process, except a SIGINT after another of them.

    Signals that have a handler already, or are ignored (nohup), are left alone, and so are all outside the main thread.

    Args:
        announce: write to standard error when a SIGINT comes: a person is there.

    Attributes:
        number: of the first that came; 0: none has.
    """

    def __init__(self, *, announce: bool) -> None:
        self.number = 0
        self._announce = announce
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        if signal.SIGINT in self._previous:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # not by Python, which may be waiting for a message
        if self._announce and number == signal.SIGINT and not self.number:
            # no print: this may have come into one
            os.write(2, b"interrupted: stopping after the current step; press Ctrl-C again to stop at once\n")
        self.number = self.number or number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
