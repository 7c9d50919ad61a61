"""What a run reports: metrics.jsonl, loggers, log lines, a progress bar, summary.json. Written by rank 0 alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetmesh.training.loggers import Loggers, require_wandb
from hetmesh.training.meter import Measured, StepCost


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
        cost: FLOPs, MFU and imbalance; empty on ranks other than 0.
        measured: memory, bytes and waits, of the steps that are logged.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples_per_s: float
    tokens_per_s: float
    time_s: float
    cost: StepCost = field(default_factory=StepCost)
    measured: Measured | None = None

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl; what is unknown is left out."""
        own = {k: v for k, v in asdict(self).items() if k not in ("cost", "measured")}
        more = asdict(self.cost) | (asdict(self.measured) if self.measured else {})
        return own | {k: v for k, v in more.items() if v not in (None, {})}

    def line(self, steps: int) -> str:
        """The log line, for people."""
        return "  ".join(self._shown(steps))

    def _shown(self, steps: int) -> Iterator[str]:
        yield f"step {self.step}/{steps}"
        yield f"loss {self.loss:.4f}"
        yield f"grad norm {self.grad_norm:.3f}"
        yield f"{self.samples_per_s:.0f} samples/s"
        yield f"{self.tokens_per_s:.0f} tokens/s"
        if self.cost.mfu is not None:
            yield f"MFU {self.cost.mfu:.1%}"
        if self.measured is not None:
            yield f"memory {amount(self.measured.memory_bytes)}B"
            yield f"{self.measured.active_ranks} of {self.measured.allocated_ranks} ranks active"
        for name, uneven in self.cost.imbalance.items():
            shown = [name]
            if name in self.cost.flops:
                shown.append(f"{amount(self.cost.flops[name])}FLOP")
            if name in self.cost.module_mfu:
                shown.append(f"MFU {self.cost.module_mfu[name]:.1%}")
            yield " ".join([*shown, f"imbalance {uneven:.2f}"])
        for name, sizes in self.measured.boundary_bytes.items() if self.measured else ():
            assert self.measured is not None
            yield f"{name} {amount(sum(sizes.values()))}B waited {1000 * self.measured.wait_s[name]:.0f} ms"


def amount(value: float) -> str:
    """A number with a decimal prefix: `amount(12_345_678)` is `"12.3 M"`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} E"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested tables as one, keys joined by `/`, as TensorBoard and Weights & Biases group them."""
    out: dict[str, float] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


class Reporter:
    """Writes metrics on rank 0 and does nothing on the others.

    Args:
        folder: the run's dump folder.
        steps: of the whole run.
        resumed_at: steps done by earlier runs; later lines of metrics.jsonl are dropped, they will come again.
        log_freq: steps between two log lines.
        tensorboard, wandb: which loggers to feed.
        config: the recipe, for Weights & Biases.

    Raises:
        RecipeError: wandb is wanted but not installed.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        rank: int,
        resumed_at: int = 0,
        log_freq: int = 10,
        tensorboard: bool = False,
        wandb: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if wandb:
            require_wandb()  # on every rank: no one waits for a rank 0 that has failed
        self.folder, self.steps, self.log_freq = folder, steps, log_freq
        self.active = rank == 0
        self.console = Console(quiet=not self.active, highlight=False)
        if not self.active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _truncate(path, resumed_at)
        self._file = path.open("a", encoding="utf-8")
        self._loggers = Loggers(folder, tensorboard=tensorboard, wandb=wandb, config=config)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn(
                "loss {task.fields[loss]:.4f}  grad norm {task.fields[norm]:.3f}  {task.fields[rate]:.0f} samples/s"
                "{task.fields[mfu]}"
            ),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task(
            "train", total=steps, completed=resumed_at, loss=0.0, norm=0.0, rate=0.0, mfu=""
        )
        self._progress.start()

    def logs(self, step: int) -> bool:
        """Whether `step` gets a log line; the same on every rank."""
        return step % self.log_freq == 0 or step == self.steps

    def step(self, metrics: StepMetrics) -> None:
        """Report one step."""
        if not self.active:
            return
        self._file.write(json.dumps(metrics.record()) + "\n")
        self._file.flush()
        self._progress.update(
            self._task,
            completed=metrics.step,
            loss=metrics.loss,
            norm=metrics.grad_norm,
            rate=metrics.samples_per_s,
            mfu="" if metrics.cost.mfu is None else f"  MFU {metrics.cost.mfu:.1%}",
        )
        if not self.logs(metrics.step):
            return
        self._loggers.log({k: v for k, v in flat(metrics.record()).items() if k != "step"}, metrics.step)
        if not self.console.is_terminal:
            self.print(metrics.line(self.steps))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Report an evaluation: a name and a number each."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.print(f"validation at step {step}: {shown}")
        if self.active:
            self._loggers.log({f"validation/{k}": v for k, v in scores.items()}, step)

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
            self._loggers.close()


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
