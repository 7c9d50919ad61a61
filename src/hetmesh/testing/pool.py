"""WorkerPool: persistent gloo processes that run functions for tests, and are rebuilt after any failure.

Starting torch.distributed costs seconds, a message to a running worker a millisecond: so a test session shares one
pool. A half-done collective leaves bytes on the wire, so after any failure all workers are killed and started anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hetmesh._processes import no_blas_threads, threads
from hetmesh.errors import HetmeshError

# Imported once by the fork server. The first DTensor operation imports ~300 modules (the two private ones among them):
# 8 workers doing so on 2 cores take 11 s. A name that a later torch drops costs only that time.
_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.tensor._random",
    "hetmesh.boundary",
)
# Imported by the fork server if the parent has them when the first pool of the process starts.
_PRELOAD_IF_LOADED = ("numpy", "pytest", "hypothesis", "transformers", __name__)
_GRACE = 0.3  # s; after a failure: time for the reports of the others. A death closes sockets before its sentinel
_REAP = 5.0  # s; a killed process is gone long before


class WorkerError(HetmeshError, RuntimeError):
    """A pool worker died, hung, or raised something that cannot be carried to the parent.

    For a hang the message holds the stack of every hung worker. The pool is usable: it starts new workers.

    Attributes:
        ranks: the workers at fault.
    """

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerPool:
    """`size` processes on this machine, joined in one gloo world; started by the first `run`.

        with WorkerPool(4) as pool:
            sums = pool.run(all_reduce, torch.ones(3))      # [all_reduce(rank, ones) of rank 0, 1, 2, 3]

    Functions must be importable: defined at the top level of a module (a test module will do) or of the main script,
    which then starts its pool under `if __name__ == "__main__":`. Arguments and results travel by pickle. Workers are
    single-threaded and keep their process-global state between calls (process groups, caches): that is what makes
    them fast. Random seeds and the default dtype are reset before every case, so that no case depends on those before.

    Args:
        size: number of workers, the world size.
        start_timeout: seconds for all workers to start and join.
        preload: further modules to import once in the process that all workers are forked from. It serves every pool
            of this process, so only the first pool's `preload` is used; it changes speed, nothing else.
        begin: called in each worker once, when it has joined; a function of a module's top level.
    """

    def __init__(
        self,
        size: int,
        *,
        start_timeout: float = 120.0,
        preload: Sequence[str] = (),
        begin: Callable[[], object] | None = None,
    ):
        if size < 1:
            raise ValueError(f"a pool needs at least one worker, not {size}")
        self.size = size
        self.starts = 0  # times workers were started; above 1 after a failure
        self._start_timeout = start_timeout
        self._preload = tuple(preload)
        self._begin = begin
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `function(rank, *args)` in every worker.

        Args:
            timeout: seconds for all workers to answer; starting them does not count.

        Returns:
            The results, one per rank.

        Raises:
            WorkerError: a worker died (its ranks are named, and the signal) or did not answer within `timeout`.
            Exception: what `function` raised in the first worker to fail, with the rank and the worker's traceback as
                a note. What the other workers raised, if anything, is noted too.
        """
        return self.run_many(function, [args], timeout=timeout)[0]

    def run_many(
        self, function: Callable[..., Any], cases: Iterable[Sequence[Any]], *, timeout: float = 60.0
    ) -> list[list[Any]]:
        """Call `function(rank, *case)` for every case in one message: about twice the cases per second of `run`.

        Workers go through the cases in order, without waiting for each other. `timeout` is for all of them together.

        Returns:
            One list per case, of one result per rank.

        Raises:
            As `run`; the note of an exception names the case.
        """
        cases = [tuple(case) for case in cases]
        if not cases:
            return []
        what = f"{function.__module__}.{function.__qualname__}"
        if "<" in function.__qualname__:
            raise TypeError(f"{what} cannot be found by name in a worker: define it at the top level of a module")
        source = getattr(sys.modules.get(function.__module__), "__file__", None)
        payload = pickle.dumps(cases, pickle.HIGHEST_PROTOCOL)
        message = pickle.dumps((sys.path, function.__module__, source, function.__qualname__, payload))
        self._start()
        try:
            for _, connection in self._workers:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is reported by _collect
                    connection.send_bytes(message)
            answers = self._collect(timeout, what)
        except BaseException:
            self.close()  # even after Ctrl-C: workers that run on would answer the next message with this result
            raise
        return [list(results) for results in zip(*answers, strict=True)]

    def close(self) -> None:
        """Kill the workers. The pool may be used again: the next `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(_REAP)
        self._workers, self._store = [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WorkerPool({self.size}, {'running' if self._workers else 'stopped'})"

    def _start(self) -> None:
        if self._workers:
            dead = [rank for rank, (process, _) in enumerate(self._workers) if not process.is_alive()]
            if not dead:
                return
            self.close()  # killed between two calls: nobody's case failed, so just start again
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")  # a clean parent: no threads, no autograd state, no groups
        loaded = tuple(name for name in _PRELOAD_IF_LOADED if name in sys.modules)
        context.set_forkserver_preload([*_PRELOAD, *loaded, *self._preload])
        # In the parent, so that the port is free for certain and outlives any worker.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="hetmesh-pool-", ignore_cleanup_errors=True)
        self.starts += 1
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_worker,
                    args=(rank, self.size, self._store.port, theirs, str(self._stack_file(rank)), self._begin),
                    name=f"hetmesh-worker-{rank}",
                    daemon=True,
                )
                with no_blas_threads():  # the first start imports numpy in the fork server
                    process.start()
                theirs.close()
                self._workers.append((process, ours))
            self._collect(self._start_timeout, "starting the pool")
        except BaseException:
            self.close()
            raise

    def _collect(self, timeout: float, what: str) -> list[Any]:
        """One answer per rank; on the first failure gives the others a moment to report theirs, and raises."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[Any, ...]] = {}  # in order of arrival: the first is the likeliest cause
        dead: list[int] = []
        while pending := [r for r in range(self.size) if r not in answers and r not in failures and r not in dead]:
            handles: dict[Any, int] = {}
            for rank in pending:
                process, connection = self._workers[rank]
                handles |= {connection: rank, process.sentinel: rank}
            ready = wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({handles[handle] for handle in ready}):
                connection = self._workers[rank][1]
                try:
                    # poll: with only the sentinel ready, an answer sent before the death may still be in the pipe
                    succeeded, *answer = pickle.loads(connection.recv_bytes()) if connection.poll() else (None,)
                except (EOFError, ConnectionResetError):
                    succeeded, answer = None, []
                if succeeded is None:
                    dead.append(rank)
                elif succeeded:
                    answers[rank] = answer[0]
                else:
                    failures[rank] = tuple(answer)
            if dead or failures:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if dead:
            raise WorkerError(f"{what}: {self._obituary(dead)}" + _also(failures), dead)
        if failures:
            raise _carried(failures, what)
        if pending:
            raise WorkerError(f"{what}: no answer within {timeout:g} s from {self._autopsy(pending)}", pending)
        return [answers[rank] for rank in range(self.size)]

    def _obituary(self, ranks: list[int]) -> str:
        causes = []
        for rank in sorted(ranks):
            process = self._workers[rank][0]
            process.join(_REAP)
            code = process.exitcode
            how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
            causes.append(f"worker {rank} died without a Python exception ({how})")
            if stack := self._stack(rank):
                causes[-1] += f"\n{stack}\n"
        return "; ".join(causes)

    def _autopsy(self, ranks: list[int]) -> str:
        """The stacks of hung workers, which this kills: see `faulthandler.register` in `_worker`."""
        for rank in ranks:
            pid = self._workers[rank][0].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        stacks = []
        for rank in ranks:
            self._workers[rank][0].join(_REAP)
            stacks.append(f"worker {rank}\n{self._stack(rank) or '(no stack: it had not started)'}")
        return ", ".join(f"worker {rank}" for rank in ranks) + "; killed at\n\n" + "\n\n".join(stacks)

    def _stack(self, rank: int) -> str:
        file = self._stack_file(rank)
        return file.read_text(errors="replace").strip() if file.exists() else ""

    def _stack_file(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"stack_{rank}.txt"


def _also(failures: dict[int, tuple[Any, ...]]) -> str:
    return "".join(f"\nworker {rank} raised {summary}" for rank, (_, _, summary, _) in failures.items())


def _carried(failures: dict[int, tuple[Any, ...]], what: str) -> BaseException:
    """The exception of the first worker to fail, with the rank and its traceback."""
    (rank, (case, pickled, summary, stack)), *others = failures.items()
    where = f"worker {rank}, case {case} of {what}"
    try:
        error = pickle.loads(pickled)
    except Exception:  # some exceptions do not survive pickling: constructors with several arguments, local classes
        error = None
    if error is None or isinstance(error, SystemExit | KeyboardInterrupt):  # ours to report, not to obey
        error = WorkerError(f"{where}: {summary}", [rank])
    error.add_note(f"{where}:\n{stack}{_also(dict(others))}")
    return error


def _leave_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _worker(
    rank: int, size: int, port: int, connection: Connection, stack_file: str, begin: Callable[[], object] | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills the workers
    stacks = open(stack_file, "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, chain=True)  # dump all, then die
    faulthandler.enable(stacks, all_threads=False)  # for a death without an exception: of the thread that died
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A worker that hangs in gloo does not see its pipe close: leave with the parent even if it was killed.
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no need for a host name that resolves
    try:
        # The fork server, which has this environment, must have had one thread: a lock of another's stays locked here.
        if (count := threads(os.getppid())) > 1:
            raise RuntimeError(f"the process that workers are forked from has {count} threads; what is preloaded?")
        import torch
        import torch.distributed as dist

        from hetmesh._torch_compat import one_gloo_device

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with one_gloo_device():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
        if begin is not None:
            begin()
        gc.freeze()  # what is imported stays: a collection would go through it again and again
        connection.send_bytes(pickle.dumps((True, None)))
    except BaseException as error:
        connection.send_bytes(_failure(0, error))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # past gloo's destructors, which wait for peers that may be gone
        connection.send_bytes(_answer(rank, message))


def _answer(rank: int, message: bytes) -> bytes:
    import numpy as np
    import torch

    index = 0
    try:
        path, module, source, qualname, payload = pickle.loads(message)
        sys.path[:] = path
        function: Any = _import(module, source)
        for name in qualname.split("."):
            function = getattr(function, name)
        results = []
        for index, case in enumerate(pickle.loads(payload)):  # noqa: B007 - the failing case
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            results.append(function(rank, *case))
        return pickle.dumps((True, results), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # pytest's outcomes and SystemExit too
        return _failure(index, error)


def _failure(case: int, error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""
    summary = "".join(traceback.format_exception_only(error)).strip()
    stack = "".join(traceback.format_exception(error))
    return pickle.dumps((False, case, pickled, summary, stack))


def _import(name: str, source: str | None) -> Any:
    """The module; from its file where the name alone does not lead there, as with pytest's importlib mode."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, source) if source else None
        if spec is None or spec.loader is None:
            raise
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
