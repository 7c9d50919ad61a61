"""What a run reports: metrics.jsonl, TensorBoard, a progress bar, summary.json. Written by rank 0 alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetmesh import _titan


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Attributes:
        step: 1 for the first optimizer step.
        loss: cross-entropy per valid target token of the global batch.
        grad_norm: global 2-norm over all modules before clipping, replicas counted once.
        lr: `[optimizer] lr` times the schedule's factor; modules with an own rate scale alike.
        samples_per_s, tokens_per_s: of the whole job; tokens without padding.
        time_s: wall time of the step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples_per_s: float
    tokens_per_s: float
    time_s: float


class Reporter:
    """Writes metrics on rank 0 and does nothing on the others.

    Args:
        folder: the run's dump folder.
        steps: of the whole run.
        resumed_at: steps done by earlier runs; later lines of metrics.jsonl are dropped, they will come again.
    """

    def __init__(
        self, folder: Path, steps: int, *, rank: int, resumed_at: int = 0, log_freq: int = 10, tensorboard: bool = False
    ) -> None:
        self.folder, self.steps, self.log_freq = folder, steps, log_freq
        self.active = rank == 0
        self.console = Console(quiet=not self.active, highlight=False)
        self._tensorboard: Any = None
        if not self.active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _truncate(path, resumed_at)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._tensorboard = _titan.tensorboard_logger()(str(folder / "tensorboard"), None)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn(
                "loss {task.fields[loss]:.4f}  grad norm {task.fields[norm]:.3f}  {task.fields[rate]:.0f} samples/s"
            ),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=resumed_at, loss=0.0, norm=0.0, rate=0.0)
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Report one step."""
        if not self.active:
            return
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()
        self._progress.update(
            self._task, completed=metrics.step, loss=metrics.loss, norm=metrics.grad_norm, rate=metrics.samples_per_s
        )
        if metrics.step % self.log_freq and metrics.step != self.steps:
            return
        if self._tensorboard is not None:
            self._tensorboard.log({k: v for k, v in asdict(metrics).items() if k != "step"}, metrics.step)
        if not self.console.is_terminal:
            self.print(
                f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
                f"{metrics.samples_per_s:.0f} samples/s"
            )

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Report an evaluation: a name and a number each."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.print(f"validation at step {step}: {shown}")
        if self._tensorboard is not None:
            self._tensorboard.log({f"validation/{k}": v for k, v in scores.items()}, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json."""
        if self.active:
            temporary = self.folder / "summary.json.part"
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, self.folder / "summary.json")

    def print(self, text: str) -> None:
        """Print lines on rank 0, each as it is, however long."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Flush and close everything."""
        if self.active:
            self._progress.stop()
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()


def _truncate(path: Path, step: int) -> None:
    """Keep the lines of metrics.jsonl up to `step`; a line that a kill cut short goes too. All of it, or nothing."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["step"] > step:
            break
        kept.append(line + "\n")
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)  # a kill right here loses nothing
