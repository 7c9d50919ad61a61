"""`hetmesh train` in a process of its own, forked from one that has imported what it needs: 5 s of CPU less."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

from support.signal_points import SignalPoint

PRELOAD = ("hetmesh.cli.train", "hetmesh.cli.launch", "hetmesh.training.trainer", "torch._dynamo")


class ForkedCommand:
    """The part of `subprocess.Popen` that tests use. It leads a session, so that a test may kill its process group.

    Args:
        arguments: of `hetmesh train`.
        folder: for what it prints.
        points: where it gets signals.
    """

    def __init__(self, arguments: tuple[str, ...], folder: Path, points: tuple[SignalPoint, ...] = ()) -> None:
        context = get_context("forkserver")  # the one from which the workers of pools are forked, if there are any
        context.set_forkserver_preload([*PRELOAD])
        self.returncode: int | None = None
        self._printed = folder / "stdout", folder / "stderr"
        self._process = context.Process(
            target=_train, args=(arguments, dict(os.environ), points, *map(str, self._printed))
        )
        self._process.start()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed to stdout and stderr, once it has ended."""
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("hetmesh train", timeout)
        out, err = (path.read_text() for path in self._printed)
        return out, err

    def kill(self) -> None:
        """End it, and what it started, if it has not ended."""
        if self._process.is_alive():
            leads = os.getpgid(self._process.pid) == self._process.pid
            (os.killpg if leads else os.kill)(self._process.pid, signal.SIGKILL)
            self._process.join()


def _train(
    arguments: tuple[str, ...], environment: dict[str, str], points: tuple[SignalPoint, ...], *printed: str
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ |= {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    for stream, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    from hetmesh.cli import main

    for point in points:
        point.install()
    sys.exit(main(["train", *arguments]))
