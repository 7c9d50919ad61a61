"""Worker processes on this machine: started, watched and ended together; the first cause of a failure is kept."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from hetmesh import errors
from hetmesh._processes import die_with_parent, threads

Method = Literal["fork", "spawn"]

SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, n))
GRACE_S = 0.3  # after a failure: time for what caused it to be reported
LOST_PEER_GRACE_S = 5.0  # the same where all that is known is that a connection was lost: a large process dies slowly
POLL_S = 1.0  # between two looks at which workers have ended: a sentinel may be held by what a worker started
REPORT_CHARACTERS = 20_000  # of a message or a traceback: a report fits into the buffer of a pipe
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # `training.stopping`
_STOPPED = tuple(128 + number for number in _STOPPING)  # exit statuses


@dataclass(frozen=True)
class Failure:
    """Why a run ended: the rank that failed first, its error, and where it was raised (empty: nothing was raised)."""

    rank: int
    message: str
    traceback: str = ""

    @property
    def expected(self) -> bool:
        """Whether it is an error that hetmesh raises on purpose, whose message says all."""
        kind = getattr(errors, self.message.partition(":")[0], None)
        return isinstance(kind, type) and issubclass(kind, errors.HetmeshError)

    @property
    def lost_peer(self) -> bool:
        """Whether all it says is that another worker has gone."""
        ours = self.expected and not self.message.startswith("BoundaryError:")
        return not ours and bool(errors.LOST_PEER.search(self.message))

    def __str__(self) -> str:
        if not self.expected:
            return f"{self.traceback}error: rank {self.rank}: {self.message}"
        return f"error: rank {self.rank}: {self.message.partition(': ')[2]}"


class Interrupted(BaseException):
    """A signal asked this process or its workers to end. No Exception: nothing in between shall handle it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Workers:
    """`count` processes that run `function(rank, *args)`, one per rank.

        with Workers("fork", 4, function, args) as workers:
            failure = workers.join()

    After the body no worker is left. It may raise `Interrupted`: SIGTERM, SIGHUP and a first SIGINT are handed on to
    the workers as SIGTERM, so that they can save; a second SIGINT and SIGQUIT end them at once.

    Args:
        method: `"fork"` shares what this process has imported, and needs it to have one thread; `"spawn"` starts anew.

    Raises:
        RuntimeError: a fork, and there are other threads in this process.
    """

    def __init__(self, method: Method, count: int, function: Callable[..., None], args: Sequence[Any] = ()) -> None:
        self._method, self._count, self._function, self._args = method, count, function, tuple(args)
        self._running: dict[int, tuple[BaseProcess, Connection]] = {}
        self._handlers: dict[signal.Signals, Any] = {}
        self._asked = 0  # the signal that was handed on
        self._stopped = 0  # the signal after which a worker ended as it was asked to

    def __enter__(self) -> Workers:
        if self._method == "fork" and threads() > 1:
            raise RuntimeError(f"{threads()} threads in the process that forks: a lock of theirs would stay locked")
        try:
            with _signals_blocked():  # a worker between the fork and its first line must not run the parent's handlers
                self._start()
        except BaseException:  # of a signal that waited for the last line, say
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        context = multiprocessing.get_context(self._method)
        for rank in range(self._count):
            reader, writer = context.Pipe(duplex=False)
            args = (rank, os.getpid(), writer, self._function, self._args)
            process: BaseProcess = context.Process(target=_work, args=args)  # type: ignore[attr-defined]
            process.start()
            writer.close()
            self._running[rank] = process, reader
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
                self._handlers[number] = signal.signal(number, self._interrupt)

    def join(self) -> Failure | None:
        """Wait for all workers; after a failure, only until its cause is known. Raises Interrupted: they have ended
        because a signal asked them to."""
        failures: list[Failure] = []
        first = deadline = math.inf
        while self._running and (now := time.monotonic()) < deadline:
            wait([process.sentinel for process, _ in self._running.values()], min(POLL_S, deadline - now))
            failures += self._ended()
            if failures:
                first = min(first, time.monotonic())
                deadline = first + (LOST_PEER_GRACE_S if all(f.lost_peer for f in failures) else GRACE_S)
        cause = first_cause(failures) if failures else None
        if self._asked and cause is not None and cause.message in _TERMINATED:  # before they could save anything
            raise Interrupted(self._asked)
        if self._stopped and cause is None:
            raise Interrupted(self._asked or self._stopped)
        return cause

    def _ended(self) -> Iterator[Failure]:
        """What the workers that have ended since the last call died of."""
        for rank in [rank for rank, (process, _) in self._running.items() if process.exitcode is not None]:
            process, reader = self._running.pop(rank)
            report = None
            with contextlib.suppress(EOFError, OSError):  # it ended before it could report anything
                report = reader.recv() if reader.poll() else None
            if report is not None:
                yield Failure(rank, *report)
            elif process.exitcode in _STOPPED:
                self._stopped = process.exitcode - 128
            elif process.exitcode:
                yield Failure(rank, how_it_ended(process.exitcode))

    def _interrupt(self, number: int, _: object) -> None:
        if number not in _STOPPING or (number == signal.SIGINT and self._asked):
            raise Interrupted(number)
        self._asked = self._asked or number
        for process, _reader in list(self._running.values()):
            process.terminate()

    def end(self) -> None:
        """Kill all workers: after SIGTERM those that train would first end their step, without the one that failed."""
        for process, _ in self._running.values():
            process.kill()
        for process, reader in self._running.values():
            process.join()
            reader.close()
        self._running.clear()

    def __exit__(self, *_: object) -> None:
        with _signals_blocked():  # a second Ctrl-C must not leave half of them behind
            self.end()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Of several failures, in order of time, the one that caused the others.

    Workers that fail because another one did are often as quick. So the earliest error that is not about a lost
    connection counts; without one, a worker that ended without an error of its own (killed); then the earliest error.
    """
    raised = (failure for failure in failures if failure.traceback and not failure.lost_peer)
    return next(raised, next((failure for failure in failures if not failure.traceback), failures[0]))


def how_it_ended(exit_status: int) -> str:
    """What to say of a worker that left no exception; `exit_status` as `multiprocessing` gives it."""
    if exit_status >= 0:
        return f"ended with exit status {exit_status} and without an exception; its last words are above"
    name = signal.Signals(-exit_status).name
    return f"ended by signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


_TERMINATED = tuple(how_it_ended(-number) for number in _STOPPING)


def _work(rank: int, parent: int, writer: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash in a library says which lines it was called from
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
            signal.signal(number, signal.SIG_DFL)  # so that it ends a process at once, whatever that waits for
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        function(rank, *args)
    except SystemExit:
        raise
    except BaseException as error:
        texts = f"{type(error).__name__}: {error}".strip(), "".join(traceback.format_exception(error))
        writer.send((texts[0][:REPORT_CHARACTERS], texts[1][-REPORT_CHARACTERS:]))
        sys.exit(1)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
