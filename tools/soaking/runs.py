"""Runs of the digits that are killed: started by a fork, looked at from outside, compared with one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hetmesh._processes import no_blas_threads, threads

ROOT = Path(__file__).parents[2]
STEPS, KEPT = 6, 2
KEYS = (
    *("--training.steps", str(STEPS), "--training.local_batch_size", "8", "--lr_scheduler.warmup_steps", "2"),
    *("--modules.vision.config.num_hidden_layers", "1", "--modules.llm.config.num_hidden_layers", "1"),
    *("--modules.vision.config.attention_dropout", "0.2"),  # so that random state matters
    *("--validation.freq", "2", "--validation.samples", "8", "--validation.free_running", "2"),
    *("--checkpoint.keep_latest_k", str(KEPT)),
)
PRELOAD = ("hetmesh.cli.train", "hetmesh.cli.launch", "hetmesh.training.trainer", "torch._dynamo")
EXACT = ("step", "loss", "grad_norm", "lr")
LOOK = 0.001  # seconds between two looks at a process or a folder
GONE = 20.0  # seconds after which a process that is still there counts as left behind


def warm_up() -> None:
    """Import here what every start would import: the processes that are forked from this one have it.

    Raises:
        RuntimeError: something has started a thread, so that this process cannot be forked.
    """
    with no_blas_threads():
        for name in PRELOAD:
            import_module(name)
        import_module("torch").set_num_threads(1)
    if threads() > 1:
        raise RuntimeError(f"this process has {threads()} threads and cannot be forked")


class Start:
    """`hetmesh train` in a process that leads a session, forked from this one or, with `command`, a new one.

    Args:
        arguments: of `hetmesh train`, behind the recipe.
        printed: the file for what it prints.
        command: starts Python's module hetmesh; empty: fork.
        recipe, keys: what is trained, and overrides that come before `arguments`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        printed: Path,
        command: Sequence[str] = (),
        *,
        recipe: Path = ROOT / "recipes" / "digits.toml",
        keys: Sequence[str] = KEYS,
    ) -> None:
        self.printed, self.began = printed, time.monotonic()
        self.status: int | None = None
        self._leaders: set[int] = set()
        told = ["train", str(recipe), *keys, *arguments]
        self.pid = os.fork()
        if not self.pid:
            _become(told, printed, command)

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for its end, or until something else is true; False: neither was within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                break
            if until():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK)
        return True

    def when(self, there: Callable[[], bool], limit: float) -> float:
        """Seconds from its begin until something is true, or it ends."""
        self.wait(limit, there)
        return time.monotonic() - self.began

    @property
    def words(self) -> str:
        """What it has printed."""
        return self.printed.read_text(errors="replace")

    def children(self, of: int | None = None) -> list[int]:
        """Living processes that it has started, or that `of` has, in their order."""
        return [pid for pid, parent in self._living() if parent == (of or self.pid)]

    def _living(self) -> list[tuple[int, int]]:
        """Living processes of its session, and of those that its children lead (torchrun's do), with their parents."""
        self._leaders |= {self.pid}
        found = _processes()
        self._leaders |= {pid for pid, parent, session in found if parent in self._leaders and session == pid}
        return [(pid, parent) for pid, parent, session in found if session in self._leaders]

    def left_behind(self) -> list[int]:
        """Processes of its session that do not end."""
        deadline = time.monotonic() + GONE
        while found := [pid for pid, _ in self._living()]:
            if time.monotonic() > deadline:
                return found
            time.sleep(LOOK * 5)
        return []

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End all that is left of it."""
        for pid, _ in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.wait(GONE)


def _become(arguments: Sequence[str], printed: Path, command: Sequence[str]) -> None:
    status = 1
    try:
        os.setsid()
        stream = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(stream, number)
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        if command:
            os.execv(sys.executable, [sys.executable, *command, "-m", "hetmesh", *arguments])
        status = import_module("hetmesh.cli").main(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _processes() -> list[tuple[int, int, int]]:
    """Living processes of this machine, each with its parent's id and its session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    found.append((int(folder.name), int(parent), int(session)))
    return sorted(found)


def _changed(path: Path) -> float:
    """When files came into a folder or left it last (`time.time`); -1 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -1.0


class Results:
    """What runs with one `dump_folder` have left: there, or in the folders that they took beside it."""

    def __init__(self, asked: Path) -> None:
        self.asked = asked

    @property
    def folder(self) -> Path:
        """The one that the newest run took."""
        others = sorted(self.asked.parent.glob(f"{self.asked.name}-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        return others[-1] if others else self.asked

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.folder / "checkpoint"

    def step(self) -> int:
        """Of the newest complete checkpoint; 0 if there is none."""
        from hetmesh.records.checkpoint_folders import complete_steps

        return max(complete_steps(self.checkpoints), default=0)

    def saving(self, since: float = 0.0) -> bool:
        """Whether a save has begun, at `since` (`time.time`) or later, and not ended. What a start leaves that is
        killed in one stays until the next save."""
        return any(_changed(path) >= since for path in self.checkpoints.glob("step-*.partial"))

    def curve(self) -> list[tuple[Any, ...]]:
        """Step, loss, gradient norm and learning rate of all steps."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [tuple(line[key] for key in EXACT) for line in map(json.loads, lines) if "loss" in line]

    def summary(self) -> dict[str, Any]:
        """summary.json but for its times."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        del found["train_seconds"]
        return found

    def phase(self, began: float) -> str:
        """What a run that began at `began` (`time.time`) is at, as far as its files tell."""
        metrics = self.folder / "metrics.jsonl"
        if self.saving(began):
            return "saving"
        if not metrics.exists() or metrics.stat().st_mtime < began:
            return "starting or loading"
        return "last evaluation" if metrics.read_bytes().count(b'"grad_norm"') == STEPS else "training"

    def strays(self) -> list[str]:
        """What a finished run should not have left beside its checkpoints."""
        steps = range(STEPS, 0, -1)
        kept = sorted(self.checkpoints.iterdir())
        complete = [
            f"step-{step}" for step in steps if (self.checkpoints / f"step-{step}" / "checksums.json").is_file()
        ]
        return [path.name for path in kept if path.name not in complete[:KEPT]]
