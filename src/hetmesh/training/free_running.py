"""Answers to held-out samples as a model gives them by itself, on the layout that trains: no part of the true ones is
shown to it.

One token a round: all ranks evaluate the samples, each with what was answered so far, and every rank knows the most
likely next token of each. So any layout will do, and nothing is computed that an evaluation does not compute; the price
is a forward of everything per token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetmesh.data.continued import Continued, answer_start
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.training.evaluate import evaluate

if TYPE_CHECKING:
    from hetmesh.training.job import Job


@dataclass(frozen=True)
class FreeRunning:
    """What was answered to the last question of some samples.

    Attributes:
        answers: the tokens of each, the end token included where there is one.
        right: whether each says what the data have: the same text where the source can tell, else the same tokens.
        unended: answers that were stopped, by the number of tokens or by `seq_len`.
    """

    answers: tuple[tuple[int, ...], ...]
    right: tuple[bool, ...]
    unended: int

    @property
    def accuracy(self) -> float:
        """Share of samples that are right."""
        return sum(self.right) / len(self.right)


def free_running(job: Job, source: Source, samples: int, most: int, ends: Collection[int]) -> FreeRunning:
    """Answer the first `samples` of `source`. Collective over all ranks; see `evaluate`.

    Args:
        most: tokens of an answer.
        ends: tokens that end one. Where there are none, an answer has as many tokens as the data's.
    """
    count = min(samples, len(source))
    truths = [_truth(source, index) for index in range(count)]
    longest = [most if ends else min(most, len(truth)) for truth in truths]
    answers: list[list[int]] = [[] for _ in range(count)]
    stopped = {index for index in range(count) if not longest[index]}
    open_ = [index for index in range(count) if index not in stopped]
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
            token = int(predicted[at, continued.meta(at).num_targets - 1])
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
    right = tuple(_same(source, answer, truth) for answer, truth in zip(answers, truths, strict=True))
    return FreeRunning(tuple(map(tuple, answers)), right, len(stopped))


def _cut(job: Job, source: Continued) -> set[int]:
    """Samples of which `seq_len` cuts the place of the next token."""
    loader = Loader(source, len(source), job.loader.prepare, shuffle=False, skip=job.loader.skip)
    drawn = loader.drawn(range(len(source)))
    return {i for i, each in enumerate(drawn) if each.meta.num_targets < each.given.num_targets}


def _truth(source: Source, index: int) -> list[int]:
    meta = source.meta(index)
    if not meta.targets:
        return []
    start, stop = answer_start(meta), meta.targets[-1][1]
    return source.load(index, ()).tokens[start:stop].tolist()


def _same(source: Source, answer: list[int], truth: list[int]) -> bool:
    if not truth:
        return False
    decode = getattr(source, "decode", None)
    return answer == truth if decode is None else decode(answer).strip() == decode(truth).strip()
