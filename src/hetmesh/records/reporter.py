"""The reporter: writes metrics.jsonl, events.jsonl, summary.json, loggers, log lines and a progress bar, on rank 0."""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetmesh import _titan
from hetmesh.errors import OutputError, RecipeError
from hetmesh.files import to_json, write_json, writing
from hetmesh.recipe.sections import Metrics
from hetmesh.records.dump_folder import ANSWERS_FILE, METRICS_FILE, SUMMARY_FILE, Claim
from hetmesh.records.events import SAVED, RunEvents, now
from hetmesh.records.metrics import StepMetrics, flat

DEFAULTS = Metrics()
_MEMORY = 0.9  # of the pace that the time left is worked out from: about the last ten steps


class _Log(Console):
    """Standard output, for as long as it takes what is printed: a run goes on without it, and notes that."""

    def on_broken_pipe(self) -> None:
        """Who read is gone (rich would end the process)."""
        self.lost("its reader is gone")

    def lost(self, why: str) -> None:
        """Print no more."""
        if self.quiet:
            return
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        with suppress(OSError):
            os.write(2, f"note: standard output takes no more ({why}): the run goes on without its log\n".encode())


class Reporter:
    """Writes metrics on rank 0 and does nothing on the others. Raises RecipeError: wandb is wanted but not installed;
    OutputError: a file cannot be written. So does every method.

    Args:
        folder: the run's dump folder; lines are added to its metrics.jsonl.
        resumed_at: steps done by earlier runs.
        config: the recipe, for Weights & Biases.
        claim: `RunFolder.claim`, released by `close`.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        rank: int,
        resumed_at: int = 0,
        keys: Metrics = DEFAULTS,
        config: Mapping[str, Any] | None = None,
        claim: Claim | None = None,
    ) -> None:
        if keys.enable_wandb:
            require_wandb()  # on every rank: no one waits for a rank 0 that has failed
        self.folder, self.steps, self.keys = folder, steps, keys
        self.active = rank == 0
        self.console = _Log(quiet=not self.active, highlight=False)
        self._pace: float | None = None
        self._warned: set[str] = set()
        self._claim = claim
        if not self.active:
            return
        self._path = folder / METRICS_FILE
        self._events = RunEvents(folder, anew=resumed_at == 0)
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8")
        self._loggers = Loggers(folder, keys, config=config, resumed_at=resumed_at)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("loss {task.fields[loss]:.4f}  grad norm {task.fields[norm]:.3f}"),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=resumed_at, loss=0.0, norm=0.0, rate=0.0)
        self._progress.start()

    def logs(self, step: int) -> bool:
        """Whether `step` gets a log line; the same on every rank."""
        return step % self.keys.log_freq == 0 or step == self.steps

    def step(self, metrics: StepMetrics) -> None:
        if not self.active:
            return
        self._write(metrics.record())
        if self._pace is not None:
            self._pace = _MEMORY * self._pace + (1 - _MEMORY) * metrics.time_s
        elif metrics.step > 1:  # the first one also starts everything
            self._pace = metrics.time_s
        shown: dict[str, Any] = {"loss": metrics.loss, "norm": metrics.grad_norm, "rate": metrics.tokens_per_s}
        self._progress.update(self._task, completed=metrics.step, **shown)
        if not self.logs(metrics.step) and not metrics.skipped:
            return
        self._loggers.log({k: v for k, v in flat(metrics.record()).items() if k != "step"}, metrics.step)
        if not self.console.is_terminal or metrics.skipped:
            left = None if self._pace is None else self._pace * (self.steps - metrics.step)
            line = metrics.line(self.steps, left)
            self.print("  ".join([line, *metrics.details()]) if self.keys.verbose else line)

    def sync(self) -> None:
        """Let all lines of metrics.jsonl be on the disk: those of the steps that a checkpoint is about to hold."""
        if self.active and not self._file.closed:
            with writing(self._path):
                os.fsync(self._file.fileno())

    def warn_once(self, about: str, text: str) -> None:
        """Print a warning, the first one of the run about this only: the rest are counted in the metrics."""
        if about not in self._warned:
            self._warned.add(about)
            self.print(text)

    def _write(self, record: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write(to_json({**record, "timestamp": now()}) + "\n")
            self._file.flush()

    def evaluation(
        self,
        step: int,
        scores: Mapping[str, float],
        by_kind: Mapping[str, float] | None = None,
        losses: Mapping[str, float] | None = None,
        **more: float,
    ) -> None:
        """Report an evaluation, which has a line in metrics.jsonl: scores, shares of right answers `by_kind` of
        question, of several losses each by its module, and `more`, which only that line has."""
        named = {**scores, **{f"loss/{name}": loss for name, loss in (losses or {}).items()}, **(by_kind or {})}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in named.items())
        self.print(f"validation at step {step}: {shown}")
        if self.active and not self._file.closed:
            kinds = {"answer_accuracy_by_kind": by_kind} if by_kind else {}
            kinds |= {"losses": losses} if losses else {}
            self._write({"step": step, "validation": {**scores, **kinds, **more}})
            self._loggers.log({f"validation/{k}": v for k, v in named.items()}, step)

    def started(self, step: int, **values: Any) -> None:
        """Note in events.jsonl that the step after `step` comes next, and what else is known of this start."""
        if self.active:
            self._events.started(step, steps=self.steps, **values)

    def saved(self, step: int, held_s: float, time_s: float, *, asynchronous: bool) -> None:
        """Note that the checkpoint of `step` is complete, unless the run is over.

        Args:
            held_s: seconds that this rank could not train for it.
            time_s: seconds from the beginning of the save until this rank knew that it was complete.
        """
        if self.active and not self._file.closed:
            times = {"held_s": round(held_s, 3), "time_s": round(time_s, 3)}
            self._events.add(SAVED, step=step, **times, asynchronous=asynchronous)

    def ended(self, step: int, how: str, reason: str | None = None) -> None:
        if self.active:
            self._events.ended(step, how, reason)

    def answers(self, text: str, how: str) -> None:
        """Print answered questions, and keep them, with how they were answered, for the run's page."""
        if self.active and text:
            self.print(text)
            write_json(self.folder / ANSWERS_FILE, {"how": how, "text": text})

    def summary(self, values: Mapping[str, Any]) -> None:
        if self.active:
            write_json(self.folder / SUMMARY_FILE, values, indent=2)

    def print(self, text: str) -> None:
        """Print lines on rank 0, each as it is, however long."""
        try:
            self.console.print(text, markup=False, soft_wrap=True)
        except OSError as error:
            self.console.lost(error.strerror or type(error).__name__)

    def close(self) -> None:
        """Flush and close everything. Raises OutputError: not all could be written; or the error that is on its way."""
        if not self.active:
            return
        failing = sys.exception() is not None
        with suppress(OutputError) if failing else nullcontext(), ExitStack() as each:  # from the last one on
            if self._claim is not None:
                each.callback(self._claim.close)
            each.callback(self._loggers.close)
            each.callback(self._events.close)
            each.enter_context(writing(self._path))
            each.callback(self._file.close)
            each.callback(self._progress.stop)


class Loggers:
    """Takes scalars and hands them to the loggers that the recipe switched on, both torchtitan's. What TensorBoard has
    of steps after `resumed_at` is hidden: it will come again. Raises RecipeError: `wandb` is wanted but not installed;
    OutputError: something cannot be written. So do all methods."""

    def __init__(self, folder: Path, keys: Metrics, *, config: Any = None, resumed_at: int = 0) -> None:
        self.folder = folder
        self._loggers = [_wandb(folder, dict(config or {}))] if keys.enable_wandb else []
        if keys.enable_tensorboard:
            with writing(folder / "tensorboard"):
                logger = _titan.tensorboard_logger()(str(folder / "tensorboard"), None)
                if resumed_at:
                    _hide_after(logger, resumed_at)
            self._loggers.append(logger)

    def log(self, values: Mapping[str, float], step: int) -> None:
        with writing(f"{self.folder}: a logger's files"):
            for logger in self._loggers:
                logger.log(dict(values), step)

    def close(self) -> None:
        with writing(f"{self.folder}: a logger's files"):
            for logger in self._loggers:
                logger.close()


def _hide_after(logger: Any, step: int) -> None:
    """Tell TensorBoard that events after `step` in older files of this folder are void."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    writer = logger.writer.file_writer
    writer.add_event(Event(file_version="brain.Event:2"), step + 1)
    writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step + 1)


def require_wandb() -> None:
    """Raise RecipeError unless wandb is installed."""
    if importlib.util.find_spec("wandb") is None:
        raise RecipeError("metrics.enable_wandb = true: wandb is not installed; pip install wandb, or set it to false")


def _wandb(folder: Path, config: dict[str, Any]) -> Any:
    require_wandb()
    os.environ.setdefault("WANDB_PROJECT", "hetmesh")
    if "WANDB_MODE" not in os.environ and not _logged_in():
        os.environ["WANDB_MODE"] = "offline"  # otherwise it asks for a key; `wandb sync` uploads the run later
    try:
        return _titan.wandb_logger()(str(folder / "wandb"), config)
    except Exception:
        if os.environ.get("WANDB_MODE") == "offline":
            raise
        os.environ["WANDB_MODE"] = "offline"  # a run should not fail because a web server cannot be reached
        return _titan.wandb_logger()(str(folder / "wandb"), config)


def _logged_in() -> bool:
    with suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY")) or any("wandb" in host for host in netrc.netrc().hosts)
    return False
