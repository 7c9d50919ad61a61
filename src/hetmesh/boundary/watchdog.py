"""The watchdog: a wait that never returns becomes an error that says what was waited for, and the process ends.

Waits on gloo raise by themselves after their timeout. This thread is for what does not: a module stuck in Python, a
collective of a backend that never gives up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

EXIT_CODE = 70
"""Exit status of a process that its watchdog ended (EX_SOFTWARE of sysexits.h)."""


def timed_out(error: BaseException) -> bool:
    """Whether an error of gloo or NCCL says that it waited for too long (and not that a peer is gone)."""
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def _abort(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CODE)


class Watchdog:
    """Ends the process when one watched operation outlasts `timeout` seconds.

    Args:
        timeout: seconds that one operation may take.
        on_expiry: called with the message, in the watchdog's thread; by default prints it with all stacks and exits.
    """

    def __init__(self, timeout: float, on_expiry: Callable[[str], None] = _abort) -> None:
        self.timeout = timeout
        self._on_expiry = on_expiry
        self._current: tuple[float, object] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, what: object) -> Iterator[None]:
        """Watch the body; `str(what)` names it in the message. The outermost operation counts."""
        if self._current is not None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="hetmesh-watchdog", daemon=True)
            self._thread.start()
        self._current = (time.monotonic() + self.timeout, what)
        try:
            yield
        finally:
            self._current = None

    def _watch(self) -> None:
        while not self._wake.wait(min(1.0, self.timeout / 4)):
            current = self._current
            if current is not None and time.monotonic() > current[0]:
                self._on_expiry(f"watchdog: {current[1]} did not finish within {self.timeout:g} s")
                return

    def close(self) -> None:
        """Stop the thread."""
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
