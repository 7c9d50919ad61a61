"""Evaluation on held-out samples, on the layout that trains: which answers are right, whole and per kind.

It is teacher-forced: each token is guessed after the true ones before it. What is behind the first mistake of an
answer is not what the model would say by itself (`validation.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.data.drawn import DrawnBatch, describe_without_targets
from hetmesh.data.loader import VALIDATION, Loader
from hetmesh.data.source import QuestionSource, Source
from hetmesh.errors import SampleError
from hetmesh.graph import SampleMeta
from hetmesh.models.draws import EVALUATION
from hetmesh.parallel import VocabularyShards
from hetmesh.training.job import Job
from hetmesh.training.unreadable import describe_unreadable, leave_out_unreadable

_COLUMNS = 80  # of a terminal
_SHOWN = 5  # questions


@dataclass(frozen=True)
class Evaluation:
    """The result over n held-out samples.

    Attributes:
        loss: the weighted sum of `losses`.
        losses: by module, per unit that its loss counts in these samples; those that have none are left out.
        right: bool `[n]`: every target token of the sample is the arg-max (given the true tokens before it). A sample
            of which `seq_len` cut targets is not.
        predicted: int64 `[n, most targets]`: the arg-max tokens, -1 behind the last.
        asked: bool `[n]`: whether it counts as a question (`is_question`).
        kinds: the kind of each sample, empty where the source does not tell.
        skipped: why samples could not be read, of all that could not; none of these is right.
    """

    loss: float
    right: Tensor
    predicted: Tensor
    asked: Tensor
    kinds: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    losses: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Share of the questions that are right; nan without any."""
        return float(self.right[self.asked].double().mean())

    @property
    def accuracy_by_kind(self) -> dict[str, float]:
        """The same per kind of question."""
        of = [kind if asked else None for kind, asked in zip(self.kinds, self.asked.tolist(), strict=bool(self.kinds))]
        names = sorted({kind for kind in of if kind is not None})
        return {n: float(self.right[[kind == n for kind in of]].double().mean()) for n in names}


def evaluate(job: Job, source: Source, limit: int | None = None, silent: Collection[int] = ()) -> Evaluation:
    """Run `source` (or its first `limit` samples) through the modules without training. Collective over all ranks.

    Training goes on as if this had not been. `silent`: tokens that are never guessed.
    """
    with evaluating(job):
        return _evaluate(job, source, limit, silent)


@contextmanager
def evaluating(job: Job) -> Iterator[None]:
    """While it lasts, modules are in evaluation mode; the random state is left as it was."""
    parts = (job.root, *job.runtime.modules.values())
    training = [module for part in parts for module in part.modules() if module.training]
    for part in parts:
        part.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module in training:
            module.training = True


def is_question(job: Job, meta: SampleMeta) -> bool:
    """Whether a sample counts among those that are answered: all do but those whose whole answer is a media item."""
    made = [job.graph[name].media for name in job.graph.topology.after_llm]
    return bool(meta.targets) or not any(meta.num_items(media) for media in made if media is not None)


def _evaluate(job: Job, source: Source, limit: int | None, silent: Collection[int]) -> Evaluation:
    batch = job.recipe.batch.global_batch_size
    known = job.loader.payloads.sources.made(VALIDATION) is source  # workers know the run's own sources
    payloads = job.loader.payloads if known else None
    loader = Loader(
        source, batch, job.loader.prepare, shuffle=False, payloads=payloads, split=VALIDATION, skip=job.loader.skip
    )
    count = min(len(source), limit or len(source))
    drawn = draw_held_out(job.world, loader, count)
    num_targets = np.concatenate([part.metas.num_targets for part in drawn])
    planned = [(i * batch, part, job.plan(part.metas)) for i, part in enumerate(drawn)]
    if not any(sum(plan.loss_counts.values()) for _, _, plan in planned):
        raise SampleError(f"evaluation: {_nothing_to_score(drawn, job.recipe.training.seq_len)}")
    width = int(num_targets.max())
    # The line of a sample is written by one rank; the sum over ranks hands it to all.
    results = torch.zeros(count, width + 1, dtype=torch.int64)
    sums = dict.fromkeys(job.graph.losses, torch.zeros((), dtype=torch.float64, device=job.world.device))
    counts = Counter[str]()
    skipped: dict[int, str] = {}
    feeds = [job.feed(part, plan, EVALUATION, loader) for _, part, plan in planned]
    for feed, (_, _, plan) in zip(feeds, planned, strict=True):
        feed.announce(job.schedule(plan, training=False))
    counts_tokens = job.counts_loss(job.graph.llm.name)
    for start, _, plan in planned:
        feed = feeds.pop(0)  # which lets go of the samples of those before
        if loader.skip:
            plan, left_out = leave_out_unreadable(feed, job.world)
            skipped |= {start + i: reason for i, reason in left_out.items()}

        guessed: list[tuple[int, Tensor, Tensor, Tensor]] = []  # left on the device until all is queued

        def observe(m: int, logits: Tensor, batch: Mapping[str, Tensor], guessed: list = guessed) -> None:
            guesses = _most_likely(logits, silent, job.vocabulary)
            if not counts_tokens:  # it only has a share of the vocabulary
                return
            # Where ranks share the tokens of a lane, this one has some of its targets.
            index = batch.get("target_index", torch.arange(len(guesses)))
            guessed.append((m, guesses, guesses == batch["targets"], index))

        schedule = job.schedule(plan, training=False)
        observers = {job.graph.llm.name: observe} if counts_tokens or job.vocabulary is not None else {}
        for name, own in job.runtime.run(schedule, plan, feed, observers, step=0).items():
            sums[name] = sums[name] + own * job.counts_loss(name)
        counts.update(plan.loss_counts)
        for m, guesses, hits, index in guessed:
            places = [
                (start + i, j)
                for i in plan.samples_of(job.graph.llm.name, m, job.llm_lane)
                for j in range(plan.samples[i].num_targets)
            ]
            for k, guess, hit in zip(index.tolist(), guesses.tolist(), hits.tolist(), strict=True):
                sample, j = places[k]
                results[sample, 0] += hit
                results[sample, 1 + j] = guess + 1
    results = results.to(job.world.device)
    everyone = job.world.group(range(job.world.size))
    totals = torch.stack(list(sums.values()))
    with job.world.waiting("sum of the evaluation over all ranks"):
        dist.all_reduce(results, group=everyone)
        dist.all_reduce(totals, group=everyone)
    results = results.cpu()
    kinds = tuple(_kinds(job.world, source, count)) if isinstance(source, QuestionSource) else ()
    losses = {name: total / counts[name] for name, total in zip(sums, totals.tolist(), strict=True) if counts[name]}
    whole = torch.from_numpy(np.concatenate([part.given.num_targets for part in drawn]))  # also what `seq_len` cut off
    right = (results[:, 0] == whole) & (whole > 0)
    weighted = [spec.weight * losses[name] for name, spec in job.graph.losses.items() if spec.weight and name in losses]
    total = sum(weighted) if losses else math.nan
    asked = torch.tensor([is_question(job, part.given[i]) for part in drawn for i in range(len(part))])
    return Evaluation(total, right, results[:, 1:] - 1, asked, kinds, tuple(skipped.values()), losses)


def draw_held_out(world: World, loader: Loader, count: int) -> list[DrawnBatch]:
    """The first `count` samples of `loader` by global batches, of which each may take as long as that of a step."""
    drawn = []
    for start in range(0, count, loader.global_batch_size):
        part = range(start, min(start + loader.global_batch_size, count))
        with world.watchdog.watching(f"metadata of the held-out samples {part[0]} to {part[-1]}"):
            drawn.append(loader.drawn(part))
    return drawn


def _kinds(world: World, source: QuestionSource, count: int) -> Iterator[str]:
    for i in range(count):
        with world.watchdog.watching(f"kind of the held-out sample {i}"):
            kind = source.kind(i)
        yield kind


def _nothing_to_score(drawn: Sequence[DrawnBatch], seq_len: int) -> str:
    """Why no sample of `drawn` has a target token."""
    unreadable = [reason for part in drawn for reason in part.unreadable.values()]
    others = sum(map(len, drawn)) - len(unreadable)
    if not others:
        return f"no held-out sample can be read: {describe_unreadable(unreadable)}"
    readable = [(part, [i for i in range(len(part)) if i not in part.unreadable]) for part in drawn]
    part, which = next((part, which) for part, which in readable if which)
    text = describe_without_targets(part, which, seq_len)
    more = f"; nor have the other {others - len(which)}" if others > len(which) else ""
    bad = f"; {len(unreadable)} cannot be read, the first: {unreadable[0]}" if unreadable else ""
    return f"no held-out sample has a target token: {text}{more}{bad}"


def _most_likely(logits: Tensor, silent: Collection[int], vocabulary: VocabularyShards | None) -> Tensor:
    """The arg-max token of each target, of those that are not `silent`. Collective where ranks share the vocabulary."""
    if vocabulary is not None:
        return vocabulary.argmax(logits, silent)
    if silent:
        logits = logits.index_fill(-1, torch.tensor(list(silent), device=logits.device), -torch.inf)
    return logits.argmax(-1)


def show(source: Source, evaluation: Evaluation, answers: Sequence[Sequence[int]] = ()) -> list[str]:
    """Some of the questions as text, each with its picture, the model's answer and the right one.

    With `answers`, those that the model gives by itself to the first questions, these are asked and told.

    The kinds take turns, each with its first questions whose picture fits a terminal of 80 columns (or any others).
    """
    if not isinstance(source, QuestionSource):
        return []
    shown = []
    kinds = evaluation.kinds[: len(answers)] if answers else evaluation.kinds
    for i in _of_all_kinds(source, kinds, evaluation.asked.tolist())[:_SHOWN]:
        told = answers[i] if answers else [t for t in evaluation.predicted[i].tolist() if t >= 0]
        guess, truth = source.decode(told), source.answer(i)
        right = guess == truth if answers else bool(evaluation.right[i])
        verdict = "right" if right else f"wrong, it is {truth}"
        lines = [source.picture(i), f"Q: {source.question(i)}", f"A: {guess}   ({verdict})"]
        shown.append("\n".join(filter(None, lines)) + "\n")
    return shown


def _of_all_kinds(source: QuestionSource, kinds: Sequence[str], asked: Sequence[bool]) -> list[int]:
    """All questions that are `asked`, the kinds in turn in the order of their first appearance."""
    queues: dict[str, list[int]] = {}
    for i, kind in enumerate(kinds):
        if asked[i]:
            queues.setdefault(kind, []).append(i)
    for kind, queue in queues.items():
        fits = {i: max(map(len, source.picture(i).splitlines()), default=0) <= _COLUMNS for i in queue}
        queues[kind] = sorted(queue, key=lambda i: not fits[i])
    rounds = itertools.zip_longest(*queues.values())
    return [i for indices in rounds for i in indices if i is not None]
