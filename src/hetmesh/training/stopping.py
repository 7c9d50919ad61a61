"""SIGTERM, SIGINT and SIGHUP end a run behind its present step, with a checkpoint: what schedulers, people and lost
connections send."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(SystemExit):
    """A signal has ended a run behind a step, on all ranks. Where nobody catches it the process ends with the exit
    status that shells report for the signal: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


class StopSignals:
    """In its body they are noted and do not end this process, but for a SIGINT behind another of them.

    Signals that somebody else handles, or ignores (nohup), are left alone, and so are all outside the main thread.

    Args:
        announce: say so on standard error when a SIGINT comes: somebody is there.

    Attributes:
        number: of the first that came; 0: none has.
    """

    def __init__(self, *, announce: bool) -> None:
        self.number = 0
        self._announce = announce
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for each in STOPPING:
                if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[each] = signal.signal(each, self._note)
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # not by Python, which may be waiting for a message
        if self._announce and number == signal.SIGINT and not self.number:
            # no print: this may have come into one
            os.write(2, b"interrupted: the run ends behind its present step; Ctrl-C again ends it at once\n")
        self.number = self.number or number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
