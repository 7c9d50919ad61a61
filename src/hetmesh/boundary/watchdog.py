"""The watchdog: a wait that never returns becomes an error that says what was waited for, and the process ends.

Waits on gloo raise by themselves after their timeout. This thread is for what does not: a module stuck in Python, and
messages of NCCL, for which the device waits and not the process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Protocol

from hetmesh.errors import LaunchError

EXIT_CODE = 70
"""Exit status of a process that its watchdog ended (EX_SOFTWARE of sysexits.h)."""

WATCHDOG = "hetmesh-watchdog"
"""The name of its thread."""

GRACE = 2.0
"""Seconds after the timeout before the watchdog speaks (the timeout itself where that is shorter): waits that raise by
themselves come first, and what is stuck is named within timeout + 5 s."""

LONGEST_TIMEOUT_S = 1e9
"""30 years: backends count in milliseconds, up to a largest number."""


def check_timeout(seconds: object, argument: str = "timeout") -> None:
    """Raise LaunchError for what is no number of seconds that a wait may take."""
    number = seconds if isinstance(seconds, int | float) and not isinstance(seconds, bool) else 0
    if not 0 < number <= LONGEST_TIMEOUT_S:  # nan is neither
        valid = f"a number of seconds above 0 and up to {LONGEST_TIMEOUT_S:g}"
        raise LaunchError(f"{argument} must be {valid}, got {seconds!r}")


def timed_out(error: BaseException) -> bool:
    """Whether an error of gloo or NCCL says that it waited for too long (and not that a peer is gone)."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def _abort(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CODE)


class Handle(Protocol):
    """A message or collective in flight, as a `torch.distributed.Work`."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Wait for it. Raises RuntimeError where that takes longer, or the other end is gone."""

    def is_completed(self) -> bool:
        """Whether it is over, without waiting."""


class Watchdog:
    """Ends the process when one watched operation, or one expected work, outlasts `timeout` seconds and a grace.

    Args:
        timeout: seconds that one operation may take.
        on_expiry: called with the message, in the watchdog's thread; by default prints it with all stacks and exits.
    """

    def __init__(self, timeout: float, on_expiry: Callable[[str], None] = _abort) -> None:
        self.timeout = timeout
        self._on_expiry = on_expiry
        self._watched: list[_Watch] = []  # innermost last
        self._since = 0.0
        self._expected: deque[tuple[float, Handle, object]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watching(self, what: object, timeout: float | None = None) -> _Watch:
        """A context that watches its body; `str(what)` names it in the message.

        Watches nest. To enter or leave one inside counts as progress: the time begins anew, for the innermost.
        `timeout`: longer than that of the watchdog, `math.inf` for what may take as long as it likes; for all inside.
        """
        return _Watch(self, what, timeout)

    def progress(self) -> None:
        """The time of what is being watched begins anew."""
        self._since = time.monotonic()

    def expect(self, work: Handle, what: object) -> None:
        """Look after a work for which this process does not wait; its time counts from now."""
        self._start()
        while self._expected and self._expected[0][1].is_completed():
            self._expected.popleft()
        self._expected.append((time.monotonic(), work, what))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name=WATCHDOG, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._wake.wait(min(0.5, self.timeout / 4)):
            now = time.monotonic()
            message = self._late(now)
            if message is not None:
                self._on_expiry(message)
                return

    def _late(self, now: float) -> str | None:
        """What to say at `now`, if anything is late."""
        since, watched = self._since, tuple(self._watched)
        timeout = max((watch.timeout for watch in watched if watch.timeout is not None), default=self.timeout)
        if watched and now > since + timeout + min(timeout, GRACE) and since == self._since:
            inner, *outer = [str(watch.what) for watch in reversed(watched)]
            during = f" (during {outer[-1]})" if outer else ""
            return f"watchdog: {inner} did not finish within {timeout:g} s{during}"
        for since, work, what in tuple(self._expected):
            if now > since + self.timeout + min(self.timeout, GRACE) and not work.is_completed():
                return f"watchdog: {what} did not finish within {self.timeout:g} s"
        return None

    def close(self) -> None:
        self._wake.set()
        if self._thread is not None:
            self._thread.join()


class _Watch:
    """A class, not a generator: entered several times per message."""

    __slots__ = ("_watchdog", "timeout", "what")

    def __init__(self, watchdog: Watchdog, what: object, timeout: float | None) -> None:
        self._watchdog, self.what, self.timeout = watchdog, what, timeout

    def __enter__(self) -> None:
        watchdog = self._watchdog
        if watchdog._thread is None:
            watchdog._start()
        # The time first: between the two the thread may look, and must not count this one from what was long before.
        watchdog._since = time.monotonic()
        watchdog._watched.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watchdog = self._watchdog
        watchdog._since = time.monotonic()
        watchdog._watched.remove(self)
