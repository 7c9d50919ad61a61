"""Commands and scripts in processes of their own, forked from one that has imported what they need: 5 s of CPU less."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from support.signal_points import SignalPoint

# Whoever of `Forked` and the pools comes first starts the process from which all are forked: both name the same.
PRELOAD = (
    *("torch._dynamo", "torch.distributed.tensor", "torch.distributed.tensor._random"),
    *("hetmesh.boundary", "hetmesh.cli.train", "hetmesh.cli.launch", "hetmesh.training.trainer"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.siglip.modeling_siglip"),
    *("transformers.models.qwen3_moe.modeling_qwen3_moe", "peft"),
    *("torchtitan.components.optimizer", "torchtitan.components.metrics"),
    *("pytest", "hypothesis", "hetmesh.testing.pool"),
)
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Forked:
    """The part of `subprocess.Popen` that tests use, in this working directory and environment. It leads a session, so
    that a test may kill its process group.

    Args:
        function: at the top level of a module; returns the exit status.
        folder: for what it prints.
        points: where it gets signals.
        environment: what it has more.
    """

    def __init__(
        self,
        function: Callable[..., int],
        arguments: Sequence[Any],
        folder: Path,
        points: tuple[SignalPoint, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        context = get_context("forkserver")  # the one from which the workers of pools are forked, if there are any
        context.set_forkserver_preload([*PRELOAD])
        self.returncode: int | None = None
        self._printed = folder / "stdout", folder / "stderr"
        for path in self._printed:
            path.touch()
        inherited = {k: v for k, v in os.environ.items() if k not in OF_A_LAUNCHER}
        environment = {**inherited, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process = context.Process(
            target=_begin, args=(function, arguments, os.getcwd(), environment, points, *map(str, self._printed))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed to stdout and stderr, once it has ended."""
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("hetmesh", timeout)
        out, err = (path.read_text() for path in self._printed)
        return out, err

    def printed(self, text: str, times: int, timeout: float = 60.0) -> str:
        """What it has printed to stdout, once `text` is in it so many times or it has ended."""
        deadline = time.monotonic() + timeout
        while (out := self._printed[0].read_text()).count(text) < times and self._process.is_alive():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("hetmesh", timeout, out)
            self._process.join(0.02)
        return out

    def kill(self) -> None:
        """End it, and what it started, if it has not ended."""
        if self._process.is_alive():
            leads = os.getpgid(self.pid) == self.pid
            (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)
            self._process.join()


def train(*arguments: str) -> int:
    """`hetmesh train`."""
    from hetmesh.cli import main

    return main(["train", *arguments])


def script(path: str, *arguments: str) -> int:
    """A script, as Python runs it."""
    sys.argv, sys.path[:1] = [path, *arguments], [str(Path(path).parent), *sys.path[:1]]
    runpy.run_path(path, run_name="__main__")
    atexit._run_exitfuncs()  # multiprocessing does not
    return 0


def ranks_of(
    path: Path, size: int, *arguments: str, timeout: float = 120.0, starts: int = 1
) -> list[tuple[int | None, str, str]]:
    """Exit status, stdout and stderr of each rank of a script that torchrun starts on `size` ranks, `starts` times with
    one store: those of the last time, and all that was printed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for start in range(starts):
        started = []
        for rank in range(size):
            here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            here["TORCHELASTIC_RESTART_COUNT"] = str(start)
            folder = path.parent / f"rank_{rank}"
            folder.mkdir(exist_ok=True)
            started.append(Forked(script, (str(path), *arguments), folder, environment=place | here))
        try:
            printed = [process.communicate(timeout) for process in started]
        finally:
            for process in started:
                process.kill()
    return [(process.returncode, *streams) for process, streams in zip(started, printed, strict=True)]


def _begin(
    function: Callable[..., int],
    arguments: Sequence[Any],
    folder: str,
    environment: dict[str, str],
    points: tuple[SignalPoint, ...],
    *printed: str,
) -> None:
    gc.freeze()  # what is imported stays
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    for stream, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    for point in points:
        point.install()
    sys.exit(function(*arguments))
