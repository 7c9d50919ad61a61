"""What a run prints beside its metrics: warnings, each once and then counted; where results are, and what uses them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hetmesh.data.drawn import describe_cut, describe_without_targets
from hetmesh.data.mixture import MixtureSource
from hetmesh.data.source import PromptSource, Source
from hetmesh.errors import SampleError
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.dump_folder import SUMMARY_FILE, RunFolder
from hetmesh.records.reporter import Reporter
from hetmesh.resolve.schedules import over_in_flight
from hetmesh.training.upcoming import PlannedStep

MAX_SKIPPED_SHOWN = 10
"""Skipped samples that a run names in its log; all are counted."""


class StepNotices:
    """Reports what is unusual about the batches and schedules of one run."""

    def __init__(self, recipe: Recipe, reporter: Reporter) -> None:
        self.recipe, self.reporter = recipe, reporter
        self._skipped: set[str] = set()

    def batch(self, planned: PlannedStep) -> None:
        """Report samples that are skipped, that have no target, or that `seq_len` has cut. Raises SampleError: some
        samples have no target, and `[data] on_no_target` says stop."""
        step, drawn, without = planned.number + 1, planned.drawn, planned.without_target
        for line in self.skipped(step, planned.unreadable):
            self.reporter.print(line)
        seq_len = self.recipe.training.seq_len
        if without and planned.plan.num_targets:
            text = f"step {step}: {len(without)} of {len(drawn)} samples add nothing to the loss: "
            text += describe_without_targets(drawn, without, seq_len)
            if self.recipe.data.on_no_target == "stop":
                raise SampleError(f'{text}; fix or remove them, or only count them: data.on_no_target = "count"')
            self.reporter.warn_once(
                "samples_without_target",
                f"{text}; from here on they are only counted, as samples_without_target in metrics.jsonl",
            )
        if cut := describe_cut(drawn, seq_len):
            self.reporter.warn_once(
                "cut",
                f"step {step}: {cut}; from here on only counted, as tokens_dropped and media_dropped in metrics.jsonl",
            )

    def skipped(self, step: int, reasons: Mapping[int, str]) -> list[str]:
        """What the log says of the samples that `step` skips, if no earlier step did. `reasons`: by index in the
        batch."""
        lines: list[str] = []
        for reason in reasons.values():
            if len(self._skipped) < MAX_SKIPPED_SHOWN and reason not in self._skipped:
                self._skipped.add(reason)
                more = "; from here on they are only counted, as samples_skipped in metrics.jsonl"
                last = len(self._skipped) == MAX_SKIPPED_SHOWN
                lines.append(f"step {step}: skipped: {reason}{more if last else ''}")
        return lines

    def over_in_flight(self, planned: PlannedStep) -> int:
        """By how much the schedule exceeds the recipe's `bubble_fill_in_flight`."""
        over = over_in_flight(self.recipe, planned.schedule)
        if over:
            key = self.recipe.schedule_place("bubble_fill_in_flight")
            cap = self.recipe.schedule_key("bubble_fill_in_flight")
            self.reporter.warn_once(
                "over_in_flight",
                f"step {planned.number + 1}: {key} = {cap}: the routes of this batch need {cap + over} microbatches at "
                "a time; from here on such steps are only counted, as over_in_flight in metrics.jsonl",
            )
        return over


def results(recipe: Recipe, folder: Path) -> str:
    """Where a run has written its results."""
    files = "summary.json, metrics.jsonl" + (", tensorboard/" if recipe.metrics.enable_tensorboard else "")
    saved = f", {recipe.checkpoint.folder}/" if recipe.checkpoint.enable else ""
    return f"results are in {folder}: {files}{saved}"


def next_steps(recipe: Recipe, folder: Path, step: int | None, held_out: Source | None = None) -> list[str]:
    """Where the weights are, and commands that use them, as they can be typed.

    Args:
        step: of the last checkpoint.
        held_out: the run's held-out samples, if it has some.
    """
    if not recipe.checkpoint.enable or step is None:
        return ["its weights are not kept; [checkpoint] enable = true (--checkpoint.enable true) keeps them"]
    lines = [f"its weights are in {folder / recipe.checkpoint.folder / f'step-{step}'}"]
    run = shlex.quote(str(folder))
    sources = held_out.parts.values() if isinstance(held_out, MixtureSource) else (held_out,)
    if held_out is not None:
        lines.append(f"ask it: hetmesh generate {run} --sample 0")
    if held_out is None or any(isinstance(source, PromptSource) for source in sources):
        lines.append(f"ask it: hetmesh generate {run} QUESTION --image FILE")
    return [*lines, f"take it elsewhere: hetmesh export {run} DIR"]


def already_finished(recipe: Recipe, folder: RunFolder) -> list[str]:
    """What to print when a run is started that has nothing left to do; see `RunFolder.summary`."""
    lines = [
        f"the run in {folder.path} is finished: step {folder.step} of {recipe.training.steps}, results in "
        f"{folder.path / SUMMARY_FILE}; raise training.steps to go on, or give another job.dump_folder to start anew"
    ]
    exported = folder.path / recipe.checkpoint.folder / f"step-{folder.step}-hf"
    if recipe.checkpoint.last_save_in_hf and not exported.exists():
        lines.append(
            "checkpoint.last_save_in_hf was not set when it ended, and exports nothing now; hetmesh export does"
        )
    return [*lines, *next_steps(recipe, folder.path, folder.step)]
