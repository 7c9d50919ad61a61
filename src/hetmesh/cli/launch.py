"""Local workers on torch's elastic launcher: start them fast, and say in one line why they failed.

On a CPU workers are forked once everything heavy has been imported: 4 workers on 2 cores are in their first collective
4 s after the command; spawned ones, each importing torch and transformers, after 34 s, and ones from a fork server
after 9 s. Forking is safe here because the parent has started no thread pool and no autograd engine. On CUDA, where a
forked child cannot use the device, workers are spawned.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from hetmesh import errors
from hetmesh.cli import FAILURE, INTERRUPTED
from hetmesh.recipe.recipe import Recipe

# What the first step would import in every worker at once. The first DTensor operation alone imports ~300 modules.
# Two of them are private: a name that a later torch drops costs only time.
PRELOAD = ("torch._dynamo", "torch.distributed.tensor._random", "torch.distributed.tensor.parallel")
TRAINER = "hetmesh.training.trainer"
MONITOR_INTERVAL = 0.1  # s between two looks at the workers
# Cores of a machine where threads of one worker wait for each other more than they compute: digits_single on two cores
# that others use too takes 8 s of CPU for 20 steps with one thread, 60 s with two.
SMALL_MACHINE = 4
LOST_PEER = re.compile(r"connection (was )?(reset|closed|refused)|broken pipe|socket closed|socket timeout", re.I)


@dataclass(frozen=True)
class Failure:
    """Why a run ended: the rank that failed first, its error, and where it was raised."""

    rank: int
    message: str
    traceback: str = ""

    @property
    def expected(self) -> bool:
        """Whether it is an error that hetmesh raises on purpose, whose message says all."""
        name = self.message.partition(":")[0]
        return isinstance(found := getattr(errors, name, None), type) and issubclass(found, errors.HetmeshError)

    @property
    def lost_peer(self) -> bool:
        """Whether all it says is that another worker has gone."""
        ours = self.expected and not self.message.startswith("BoundaryError:")
        return not ours and bool(LOST_PEER.search(self.message))

    def __str__(self) -> str:
        if not self.expected:
            return f"{self.traceback}error: rank {self.rank}: {self.message}"
        return f"error: rank {self.rank}: {self.message.partition(': ')[2]}"


def launch(recipe: Recipe) -> int:
    """Train `recipe` on `recipe.world_size` workers of this machine, and wait for them.

    Returns:
        The exit status: 0, or 1 after one error was printed, or 130 after Ctrl-C. No worker is left running.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    workers = recipe.world_size
    threads = threads_per_worker(workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for spawned workers, and libraries other than torch
    if Path("/sys/class/net/lo").exists():
        # otherwise gloo looks this machine's name up, which fails or warns on many a container
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _quiet_launcher()
    method = start_method(workers)
    if method == "fork":
        for name in (TRAINER, *PRELOAD):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="hetmesh-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL,
            start_method=method,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, work)(recipe, threads)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            reported = Failure(rank, _how_it_ended(first.exitcode))
            _restore_terminal()
            print(first_failure(Path(folder), reported), file=sys.stderr)
            return FAILURE
        except SignalException:
            _restore_terminal()
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
    return 0


def work(recipe: Recipe, threads: int) -> None:
    """What each worker runs; torch's launcher has set RANK and the like."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        # the launcher's handlers, inherited by a fork, would wait for whatever this worker is waiting for
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    import torch

    torch.set_num_threads(threads)
    try:
        importlib.import_module(TRAINER).train(recipe)
    except Exception:
        # perhaps only because another worker was killed: give the launcher time to find that one alone
        time.sleep(3 * MONITOR_INTERVAL)
        raise


def start_method(workers: int) -> str:
    """How to start workers: `"fork"` on a CPU under Linux, else `"spawn"`."""
    import torch

    return "fork" if sys.platform == "linux" and torch.cuda.device_count() < workers else "spawn"


def threads_per_worker(workers: int) -> int:
    """`OMP_NUM_THREADS` if it is set; one on a small machine; else the cores of this process over `workers`."""
    wish = os.environ.get("OMP_NUM_THREADS", "")
    if wish.isdigit() and int(wish):
        return int(wish)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if cores <= SMALL_MACHINE else max(1, cores // workers)


def first_failure(folder: Path, reported: Failure) -> Failure:
    """The failure that caused the others, of those that workers left under `folder` and the one that was `reported`.

    The launcher reports whichever worker it finds dead first; workers that fail because another one did are often as
    quick. So the earliest error that is not about a lost connection counts; without one, a worker that ended without
    an error of its own (killed); then the earliest error.
    """
    failures: list[Failure] = []
    for file in sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a worker killed while it wrote
            content = json.loads(file.read_text())["message"]
            traceback = content["extraInfo"]["py_callstack"]
            failures.append(Failure(int(file.parent.name), content["message"].strip(), traceback))
    for failure in failures:
        if not failure.lost_peer:
            return failure
    return reported if reported.rank not in {f.rank for f in failures} else failures[0]


def _how_it_ended(exit_status: int) -> str:
    if exit_status >= 0:
        return f"ended with exit status {exit_status} and without an exception; its last words are above"
    name = signal.Signals(-exit_status).name
    return f"ended by signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _quiet_launcher() -> None:
    """Our one line replaces the launcher's reports. Each of its loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _restore_terminal() -> None:
    """A worker that died in the middle of a progress bar leaves half a line and no cursor."""
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)
