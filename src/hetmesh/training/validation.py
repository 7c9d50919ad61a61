"""What a run does with its held-out samples: it evaluates them, has questions answered, shows some, sums it up.

Free running: a model answers without seeing any part of the true answer, on the layout that trains. One token a round:
all ranks evaluate the samples, each with its answer so far, and every rank knows the most likely next token of each. So
any layout will do, and nothing is computed that an evaluation does not; the price is a forward per token.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetmesh.data.answers import Continued, answer_start, end_tokens
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source, abilities_of
from hetmesh.errors import SampleError
from hetmesh.records.reporter import Reporter
from hetmesh.training.drawing import draw_items, drawers
from hetmesh.training.evaluate import Evaluation, draw_held_out, evaluate, is_question, show
from hetmesh.training.job import Job


@dataclass(frozen=True)
class FreeRunning:
    """What was answered to the last question of some samples.

    Attributes:
        answers: the tokens of each, the end token included where there is one.
        right: whether each says what the data have: the same text where the source can tell, else the same tokens.
        asked: whether each counts as a question (`is_question`).
        unended: answers that were stopped, by the number of tokens or by `seq_len`.
    """

    answers: tuple[tuple[int, ...], ...]
    right: tuple[bool, ...]
    asked: tuple[bool, ...]
    unended: int

    @property
    def accuracy(self) -> float:
        """Share of the questions that are right; nan without any."""
        return sum(self.right) / sum(self.asked) if any(self.asked) else math.nan


def free_running(job: Job, source: Source, samples: int, most: int, ends: Collection[int]) -> FreeRunning:
    """Answer the first `samples` of `source`. Collective over all ranks; see `evaluate`.

    Args:
        most: tokens of an answer.
        ends: tokens that end one. Where there are none, an answer has as many tokens as the data's.
    """
    count = min(samples, len(source))
    truths = _truths(job, source, count)
    readable = [truth.readable and truth.question for truth in truths]
    longest = [
        (most if ends else min(most, len(truth.answer))) * each for truth, each in zip(truths, readable, strict=True)
    ]
    answers: list[list[int]] = [[] for _ in range(count)]
    stopped = {index for index in range(count) if not longest[index] and truths[index].question}
    open_ = [index for index in range(count) if longest[index]]
    silent = tuple(source.placeholders.values())
    while open_:
        cut = _cut(job, Continued(source, open_, [answers[index] for index in open_]))
        stopped |= {open_[at] for at in cut}
        open_ = [index for at, index in enumerate(open_) if at not in cut]
        if not open_:
            break
        continued = Continued(source, open_, [answers[index] for index in open_])
        predicted = evaluate(job, continued, silent=silent).predicted
        still = []
        for at, index in enumerate(open_):
            token = int(predicted[at, truths[index].targets_before + len(answers[index])])
            if token < 0:  # the sample could not be read
                stopped.add(index)
                continue
            answers[index].append(token)
            if token in ends:
                continue
            if len(answers[index]) < longest[index]:
                still.append(index)
            elif ends:
                stopped.add(index)
        open_ = still
    right = tuple(_same(source, answer, truth.answer) for answer, truth in zip(answers, truths, strict=True))
    asked = tuple(truth.question for truth in truths)
    return FreeRunning(tuple(map(tuple, answers)), right, asked, len(stopped))


def _cut(job: Job, source: Continued) -> set[int]:
    """Samples of which `seq_len` cuts the place of the next token."""
    loader = Loader(source, job.recipe.batch.global_batch_size, job.loader.prepare, shuffle=False, skip=job.loader.skip)
    drawn = itertools.chain.from_iterable(draw_held_out(job.world, loader, len(source)))
    return {i for i, each in enumerate(drawn) if each.meta.num_targets < each.given.num_targets}


@dataclass(frozen=True)
class _Truth:
    """The tokens of the last answer of a sample, how many target tokens lie before it, whether it can be read, and
    whether it counts as a question."""

    answer: list[int]
    targets_before: int
    readable: bool = True
    question: bool = True


_UNREADABLE = _Truth([], 0, readable=False)


def _truths(job: Job, source: Source, count: int) -> list[_Truth]:
    """Of the first samples. With `on_bad_sample = "skip"`, what any rank cannot read is not `readable`. Collective.
    Raises SampleError: a sample cannot be read, and shall not be skipped."""
    world, found = job.world, list[_Truth]()
    for index in range(count):
        with world.watchdog.watching(f"the right answer of the held-out sample {index}"):
            try:
                found.append(_truth(job, source, index))
            except SampleError:
                if not job.loader.skip:
                    raise
                found.append(_UNREADABLE)
    if job.loader.skip:  # what is asked next has to be the same on all ranks
        readable = torch.tensor([truth.readable for truth in found], dtype=torch.int32, device=world.device)
        with world.waiting("which held-out samples any rank cannot read"):
            dist.all_reduce(readable, dist.ReduceOp.MIN, group=world.group(range(world.size)))
        found = [truth if here else _UNREADABLE for truth, here in zip(found, readable.tolist(), strict=True)]
    return found


def _truth(job: Job, source: Source, index: int) -> _Truth:
    meta = source.meta(index)
    if not meta.targets:
        return _Truth([], 0, question=is_question(job, meta))
    start, stop = answer_start(meta), meta.targets[-1][1]
    return _Truth(source.load(index, ()).tokens[start:stop].tolist(), meta.num_targets - (stop - start))


def _same(source: Source, answer: list[int], truth: list[int]) -> bool:
    if not truth:
        return False
    decode = abilities_of(source).decode
    return answer == truth if decode is None else decode(answer).strip() == decode(truth).strip()


class RunValidation:
    """The `[validation]` of a run.

    Args:
        source: the held-out samples; None where the run has none, and then nothing is done.

    Attributes:
        last, answered: what was found the last time.
        drawn: whether the media items that were made for samples are what these ask for, by a source that can judge.
    """

    def __init__(self, job: Job, source: Source | None, reporter: Reporter) -> None:
        self.job, self.source, self.reporter = job, source, reporter
        self.last: Evaluation | None = None
        self.answered: FreeRunning | None = None
        self.drawn: list[bool] = []

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
        scores = {"loss": evaluation.loss}
        if evaluation.asked.any():
            scores["answer_accuracy"] = evaluation.accuracy
        if keys.free_running:
            ends = end_tokens(self.source, self.job.recipe)
            self.answered = free_running(self.job, self.source, keys.free_running, keys.free_running_tokens, ends)
            if any(self.answered.asked):
                scores["free_running_accuracy"] = self.answered.accuracy
        if (judge := abilities_of(self.source).judge) is not None:
            drawn = [draw_items(self.job, self.source, name, keys.samples) for name in drawers(self.job)]
            self.drawn = [judge(index, item) for each in drawn for index, items in each.items() for item in items]
        if self.drawn:
            scores["drawn_accuracy"] = sum(self.drawn) / len(self.drawn)
        measured = {"samples": len(evaluation.right), "time_s": round(time.perf_counter() - started, 3)}
        losses = evaluation.losses if len(self.job.graph.losses) > 1 else {}
        self.reporter.evaluation(step, scores, evaluation.accuracy_by_kind, losses, **measured)
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
            found["validation_loss"] = self.last.loss
            if len(self.job.graph.losses) > 1:
                found["validation_losses"] = dict(self.last.losses)
        if self.last is not None and self.last.asked.any():
            found |= {
                "answer_accuracy": self.last.accuracy,
                "answer_accuracy_by_kind": self.last.accuracy_by_kind,
                "questions": int(self.last.asked.sum()),
            }
        if self.answered is not None and any(self.answered.asked):
            found |= {
                "free_running_accuracy": self.answered.accuracy,
                "free_running_questions": sum(self.answered.asked),
                "free_running_unended": self.answered.unended,
            }
        if self.drawn:
            found |= {"drawn_accuracy": sum(self.drawn) / len(self.drawn), "drawn": len(self.drawn)}
        return found
