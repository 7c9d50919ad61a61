"""What a run does with its held-out samples: it evaluates them, has questions answered, shows some, sums it up."""

from __future__ import annotations

import time
from typing import Any

from hetmesh.data.end_tokens import end_tokens
from hetmesh.data.source import Source
from hetmesh.records.reporter import Reporter
from hetmesh.training.evaluate import Evaluation, evaluate, show
from hetmesh.training.free_running import FreeRunning, free_running
from hetmesh.training.job import Job


class RunValidation:
    """The `[validation]` of a run.

    Args:
        source: the held-out samples; None where the run has none, and then nothing is done.

    Attributes:
        last, answered: what was found the last time.
    """

    def __init__(self, job: Job, source: Source | None, reporter: Reporter) -> None:
        self.job, self.source, self.reporter = job, source, reporter
        self.last: Evaluation | None = None
        self.answered: FreeRunning | None = None

    def due(self, step: int) -> bool:
        """Whether `[validation] freq` asks for an evaluation after `step`, which is not the last one."""
        freq = self.job.recipe.validation.freq
        return freq > 0 and step > 0 and step % freq == 0

    def run(self, step: int) -> Evaluation | None:
        """Evaluate after `step`, and report it. Collective."""
        if self.source is None:
            return None
        keys = self.job.recipe.validation
        started = time.perf_counter()
        evaluation = self.last = evaluate(self.job, self.source, keys.samples)
        scores = {"loss": evaluation.loss, "answer_accuracy": evaluation.accuracy}
        if keys.free_running:
            ends = end_tokens(self.source, self.job.recipe)
            self.answered = free_running(self.job, self.source, keys.free_running, keys.free_running_tokens, ends)
            scores["free_running_accuracy"] = self.answered.accuracy
        measured = {"samples": len(evaluation.right), "time_s": round(time.perf_counter() - started, 3)}
        self.reporter.evaluation(step, scores, evaluation.accuracy_by_kind, **measured)
        if evaluation.skipped:
            many, first = len(evaluation.skipped), evaluation.skipped[0]
            self.reporter.print(f"validation: {many} samples cannot be read and count as wrong; the first: {first}")
        return evaluation

    def shown(self) -> tuple[str, str]:
        """Some samples with their answers, for people, and how they were answered."""
        if self.source is None or self.last is None:
            return "", ""
        answers = self.answered.answers if self.answered else ()
        how = "token by token" if answers else "each token guessed after the right ones before it"
        return "\n".join(show(self.source, self.last, answers=answers)), how

    def summary(self) -> dict[str, Any]:
        """What the summary of the run says of it."""
        found: dict[str, Any] = {}
        if self.last is not None:
            found |= {
                "validation_loss": self.last.loss,
                "answer_accuracy": self.last.accuracy,
                "answer_accuracy_by_kind": self.last.accuracy_by_kind,
                "questions": len(self.last.right),
            }
        if self.answered is not None:
            found |= {
                "free_running_accuracy": self.answered.accuracy,
                "free_running_questions": len(self.answered.right),
                "free_running_unended": self.answered.unended,
            }
        return found
