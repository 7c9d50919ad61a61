"""Worker processes on this machine: started together, watched together, ended together, and the first cause kept."""

from __future__ import annotations

import contextlib
import faulthandler
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
GRACE = 0.3  # s; after a failure: time for what caused it to be reported
PATIENCE = 5.0  # s; the same where all that is known is that a connection was lost: a large process dies slowly
LOOK = 1.0  # s between two looks at who has ended: a sentinel may be held by what a worker started
MOST = 20_000  # characters of a message or a traceback: a report fits into the buffer of a pipe
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # `training.stopping`
_STOPPED = tuple(128 + number for number in _STOPPING)  # exit statuses


@dataclass(frozen=True)
class Failure:
    """Why a run ended: the rank that failed first, its error, and where it was raised."""

    rank: int
    message: str
    traceback: str = ""

    @property
    def reported(self) -> bool:
        """Whether it is an exception that the worker told of."""
        return bool(self.traceback)

    @property
    def expected(self) -> bool:
        """Whether it is an error that hetmesh raises on purpose, whose message says all."""
        name = self.message.partition(":")[0]
        return isinstance(found := getattr(errors, name, None), type) and issubclass(found, errors.HetmeshError)

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
        self._stopped = 0  # the signal that a worker said had ended it behind a step

    def __enter__(self) -> Workers:
        if self._method == "fork" and threads() > 1:
            raise RuntimeError(f"{threads()} threads in the process that forks: a lock of theirs would stay locked")
        try:
            with _blocked(SIGNALS):  # a worker between the fork and its first line must not run the parent's handlers
                self._start()
        except BaseException:  # of a signal that waited for the last line, say
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        context = multiprocessing.get_context(self._method)
        for rank in range(self._count):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, os.getpid(), theirs, self._function, self._args)
            process: BaseProcess = context.Process(target=_worker, args=args)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._running[rank] = process, ours
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
                self._handlers[number] = signal.signal(number, self._interrupt)

    def join(self) -> Failure | None:
        """Wait for all workers; after a failure, only until its cause is known.

        Raises:
            Interrupted: they have ended because a signal asked them to.
        """
        failures: list[Failure] = []
        first = 0.0
        while self._running:
            left = None
            if failures:
                first = first or time.monotonic()
                patience = PATIENCE if all(f.lost_peer for f in failures) else GRACE
                left = max(0.0, first + patience - time.monotonic())
            if not self._wait(left, failures):
                break
        cause = first_cause(failures) if failures else None
        if self._asked and cause is not None and cause.message in _TERMINATED:  # before they could save anything
            raise Interrupted(self._asked)
        if self._stopped and cause is None:
            raise Interrupted(self._asked or self._stopped)
        return cause

    def _wait(self, seconds: float | None, failures: list[Failure]) -> bool:
        """Wait for any worker to end and add what it died of; False: none did."""
        deadline = None if seconds is None else time.monotonic() + seconds
        ended: list[int] = []
        while not ended:
            left = LOOK if deadline is None else max(0.0, min(LOOK, deadline - time.monotonic()))
            wait([process.sentinel for process, _ in self._running.values()], left)
            ended = [rank for rank, (process, _) in self._running.items() if process.exitcode is not None]
            if not ended and deadline is not None and time.monotonic() >= deadline:
                return False
        for rank in ended:
            process, connection = self._running.pop(rank)
            with contextlib.suppress(EOFError, OSError):  # it ended without a word
                if connection.poll():
                    failures.append(Failure(rank, *connection.recv()))
                    continue
            if process.exitcode in _STOPPED:
                self._stopped = process.exitcode - 128
            elif process.exitcode:
                failures.append(Failure(rank, how_it_ended(process.exitcode)))
        return True

    def _interrupt(self, number: int, _: object) -> None:
        if number not in _STOPPING or (number == signal.SIGINT and self._asked):
            raise Interrupted(number)
        self._asked = self._asked or number
        for process, _connection in list(self._running.values()):
            process.terminate()

    def end(self) -> None:
        """End all workers at once: SIGTERM would have those that train end their step first, without who has failed."""
        for process, _ in self._running.values():
            process.kill()
        for process, connection in self._running.values():
            process.join()
            connection.close()
        self._running.clear()

    def __exit__(self, *_: object) -> None:
        with _blocked(SIGNALS):  # a second Ctrl-C must not leave half of them behind
            self.end()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Of several failures, in order of time, the one that caused the others.

    Workers that fail because another one did are often as quick. So the earliest error that is not about a lost
    connection counts; without one, a worker that ended without an error of its own (killed); then the earliest error.
    """
    for kind in (
        [f for f in failures if f.reported and not f.lost_peer],
        [f for f in failures if not f.reported],
        failures,
    ):
        if kind:
            return kind[0]
    raise ValueError("no failure")


def how_it_ended(exit_status: int) -> str:
    """What to say of a worker that left no exception; `exit_status` as `multiprocessing` gives it."""
    if exit_status >= 0:
        return f"ended with exit status {exit_status} and without an exception; its last words are above"
    name = signal.Signals(-exit_status).name
    return f"ended by signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


_TERMINATED = tuple(how_it_ended(-number) for number in _STOPPING)


def _worker(rank: int, parent: int, report: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """The life of one worker."""
    die_with_parent(parent)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash in a library says which lines it was called from
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
            # by default a signal ends a process at once, whatever it waits for
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        function(rank, *args)
    except SystemExit:
        raise
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".strip()
        report.send((message[:MOST], "".join(traceback.format_exception(error))[-MOST:]))
        sys.exit(1)


@contextlib.contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
