"""`hetmesh train` on one machine: a worker for each rank, started fast, and one line that says why they failed.

On a CPU workers are forked once everything heavy has been imported: 4 workers on 2 cores are in their first collective
4 s after the command; spawned ones, each importing torch and transformers, after 34 s. Forking is safe only in a
process with one thread: no store, thread pool or autograd engine is started before. On CUDA workers are spawned.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from hetmesh._processes import threads
from hetmesh.cli import FAILURE
from hetmesh.cli.launchers import HOST, Place, find_place
from hetmesh.cli.workers import Failure, Interrupted, Method, Workers
from hetmesh.errors import LaunchError
from hetmesh.recipe.recipe import Recipe

# What the first step would import in every worker at once. The first DTensor operation alone imports ~300 modules.
# Two of them are private: a name that a later torch drops costs only time.
PRELOAD = (
    *("hetmesh.api", "torch._dynamo", "torch.distributed.tensor._random", "torch.distributed.tensor.parallel"),
    "torchtitan.components.optimizer",
)
# Cores of a machine where threads of one worker wait for each other more than they compute: digits_single on two cores
# that others use too takes 8 s of CPU for 20 steps with one thread, 60 s with two.
SMALL_MACHINE_CORES = 4


def launch_recipe(recipe: Recipe) -> int:
    """Train `recipe` on `recipe.world_size` workers of this machine, and wait for them: none is left running. Returns
    the exit status: 0; 1: one error was printed; 130: SIGINT; 143: SIGTERM. Raises LaunchError: this machine has GPUs,
    but fewer than workers."""
    try:
        failure = _run(_train, recipe.world_size, (recipe,), "the recipe has")
    except Interrupted as error:
        _restore_terminal()
        print("interrupted", file=sys.stderr)
        return 128 + error.number
    if failure is None:
        return 0
    _restore_terminal()
    print(failure, file=sys.stderr)
    return FAILURE


def launch(function: Callable[..., object], ranks: int, /, *args: Any) -> None:
    """Run `function(*args)` in `ranks` worker processes of this machine, in an environment such as torchrun makes, and
    wait for them. In a process that torchrun, srun or mpirun started it is called right here, as one of their workers.

    Workers are forked on a CPU, where this process has one thread. Otherwise they start anew: `function` is then at the
    top level of a module, and a script calls this under `if __name__ == "__main__":`. Raises LaunchError: a worker
    failed (its error), the launcher started another number of processes, or GPUs are fewer.
    """
    place = find_place(os.environ)
    if place is not None:
        if place.size != ranks:
            raise LaunchError(f"{ranks} ranks are needed, but {place.launcher} started {place.size} processes")
        os.environ |= place.environment
        function(*args)
        return
    try:
        failure = _run(function, ranks, args, "this script asks for")
    except Interrupted as error:
        if error.number == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise SystemExit(128 + error.number) from error
    if failure is not None:
        raise LaunchError(str(failure).removeprefix("error: "))


def _run(function: Callable[..., object], count: int, args: tuple[Any, ...], who: str) -> Failure | None:
    """Why `function(*args)` failed in one of `count` workers, if it did."""
    per_worker = threads_per_worker(count)
    os.environ["OMP_NUM_THREADS"] = str(per_worker)  # for spawned workers, and libraries other than torch
    if Path("/sys/class/net/lo").exists():
        # otherwise gloo looks this machine's name up, which fails or warns on many a container
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    method = start_method(count, who)
    if method == "fork":
        for name in PRELOAD:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if threads() > 1:  # of the recipe's own code, say
            print(f"note: this process has {threads()} threads, so its workers start anew (slower)", file=sys.stderr)
            method = "spawn"
    # Its port is free for certain, and workers may knock at it before there is a store; the store has threads.
    listener = socket.create_server((HOST, 0), backlog=max(128, count))
    port = listener.getsockname()[1]
    with Workers(method, count, work, (count, per_worker, port, function, args)) as workers:
        store = TCPStore(
            HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=5),
            master_listen_fd=listener.detach(),
        )
        failure = workers.join()
        del store
    return failure


def _train(recipe: Recipe) -> None:
    from hetmesh.api import run_recipe

    run_recipe(recipe)


def work(
    rank: int, count: int, per_worker: int, port: int, function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """What each worker runs, in an environment such as torchrun would make."""
    os.environ |= Place("hetmesh", rank, count, rank, count, HOST, port).environment | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's: rank 0 shall not start one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(per_worker)
    function(*args)


def start_method(workers: int, who: str = "the recipe has") -> Method:
    """How to start workers: `"fork"` on a CPU under Linux, else `"spawn"`. Raises LaunchError: too few GPUs."""
    devices = torch.cuda.device_count()
    if 0 < devices < workers:
        raise LaunchError(
            f"{who} {workers} ranks, and this machine {devices} CUDA device{'s' * (devices > 1)}: give the "
            f"modules {devices} ranks, start it on more machines with torchrun or srun, or set CUDA_VISIBLE_DEVICES= "
            "(empty) to train on the CPU"
        )
    return "fork" if sys.platform == "linux" and not devices else "spawn"


def threads_per_worker(workers: int) -> int:
    """`OMP_NUM_THREADS` if it is set; one on a small machine; else the cores of this process over `workers`."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdigit() and int(setting):
        return int(setting)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if cores <= SMALL_MACHINE_CORES else max(1, cores // workers)


def _restore_terminal() -> None:
    """A worker that died in the middle of a progress bar leaves half a line and no cursor."""
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)
