"""The metadata-first loader: every rank knows every sample's shape, and loads only the samples that it processes.

The samples of a run are an infinite stream, the source's in a new order for each epoch, cut into batches: a pure
function of the seed and a place in the stream, which is what is saved. Lanes, microbatches and batch sizes may differ
when a run goes on from there. A batch may thus hold the end of one epoch and the start of the next; within an epoch no
sample is lost or repeated. (Only where epochs meet, or an epoch is smaller than a batch, can a sample be
twice in one batch.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hetmesh.data.drawn import DrawnBatch, DrawnSample
from hetmesh.data.expand import ExpandedArrays, Expander, expand_tokens
from hetmesh.data.payloads import Payload, Payloads, SplitSources, Unreadable, Wanted
from hetmesh.data.position import ELSEWHERE, ORDER, RESTORE, PositionIdentity
from hetmesh.data.sample_order import EpochOrder, SampleOrder
from hetmesh.data.source import LEAVE_OUT, Sample, Source, metas_of, wants
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import MetaArrays, SampleMeta

TRAIN, VALIDATION = "train", "validation"
"""The splits of a run."""


class Loader:
    """Draws global batches from a source; an iterator whose position can be saved.

    Args:
        source: of at least one sample.
        global_batch_size: samples per step.
        prepare: from a source's metadata to the expanded. None leaves samples as the source gives them.
        shuffle: False keeps the source's order in every epoch; else `seed` chooses the orders.
        order: of the samples, where it is another one.
        payloads: where samples are loaded; None: in this process, when they are asked for.
        split: what `source` is called among the sources of `payloads`.
        skip: a sample whose metadata cannot be read is drawn as `DrawnSample.unreadable`, not an error.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        prepare: Expander | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        order: SampleOrder | None = None,
        payloads: Payloads | None = None,
        split: str = TRAIN,
        skip: bool = False,
    ) -> None:
        self.source, self.global_batch_size, self.prepare = source, global_batch_size, prepare
        self.seed, self.shuffle = seed, shuffle
        self.order: SampleOrder = order or EpochOrder(len(source), seed, shuffle=shuffle)
        self.payloads = payloads or Payloads(SplitSources({split: lambda: source}))
        self.split, self.skip = split, skip
        self.step = 0
        """The step whose batch `next` gives."""
        self._since = (0, 0)  # a step, and the place of its first sample in the stream

    def indices(self, step: int) -> tuple[int, ...]:
        """Source indices of the global batch at `step`, in order. Raises ValueError: that is before the run."""
        return tuple(self.order.indices(self.place(step), self.global_batch_size))

    def place(self, step: int) -> int:
        """The place of the first sample of `step` in the stream of samples."""
        since, sample = self._since
        if step < since:
            raise ValueError(f"step {step} lies before step {since}, where the data position was restored")
        return sample + (step - since) * self.global_batch_size

    def batch(self, step: int) -> DrawnBatch:
        """The global batch at `step`: the same on every rank, and no payload is loaded. Raises SampleError: a sample's
        metadata is malformed or does not suit the modules."""
        return self.drawn(self.indices(step))

    def drawn(self, indices: Sequence[int]) -> DrawnBatch:
        """The prepared metadata of some samples of the source. Raises SampleError: as `batch`."""
        given = metas_of(self.source, indices, self.payloads.sources.reading)
        refusals = {i: SampleError(reason) for i, reason in given.unreadable.items()}
        if self.prepare is not None:
            refusals = self.prepare.refusals(given)
        if refusals and not self.skip:
            raise SampleError(f"{next(iter(refusals.values()))}; {LEAVE_OUT}")
        if refusals:
            blanks = {i: SampleMeta(f"unreadable-{indices[i]}", 1) for i in refusals}
            given = MetaArrays.of([blanks.get(i) or given.meta(i) for i in range(len(given))])
        nothing = np.zeros(len(given), np.int64)
        expanded = ExpandedArrays(given, nothing, nothing) if self.prepare is None else self.prepare.all(given)
        return DrawnBatch(tuple(indices), given, expanded, {i: str(error) for i, error in refusals.items()})

    def load(self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None) -> list[Sample]:
        """The expanded payloads of the samples asked for, in that order, with the `kinds` of media that are wanted by
        source index (None: all). Raises SampleError: a payload does not agree with its metadata, or holds a token
        outside the vocabulary."""
        payloads = self.try_load(drawn, kinds)
        for payload in payloads:
            if isinstance(payload, Unreadable):
                raise SampleError(f"{payload.message}; {LEAVE_OUT}")
        return [payload for payload in payloads if not isinstance(payload, Unreadable)]

    def try_load(
        self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None
    ) -> list[Payload]:
        """As `load`, with `Unreadable` in place of what it refuses."""
        drawn = list(drawn)
        payloads = iter(self.payloads.get(self.wanted(drawn, kinds)))
        return [self._expanded(sample, None if kinds is None else kinds[sample.index], payloads) for sample in drawn]

    def wanted(self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None) -> list[Wanted]:
        """What `load` asks `payloads` for, which may be announced beforehand."""
        return [
            Wanted(self.split, sample.index, None if kinds is None else tuple(sorted(kinds[sample.index])))
            for sample in drawn
            if not sample.unreadable
        ]

    def blank(self, drawn: DrawnSample, kinds: Collection[str] | None) -> Sample:
        """What stands for a sample that cannot be read: padding, and zeros or empty units as planned."""
        meta, media, rows = drawn.meta, dict[str, list[torch.Tensor]](), Counter[str]()
        tokens = torch.full((meta.tokens,), self.source.pad_id)
        for item in meta.media:
            for position, count in item.spans:
                tokens[position : position + count] = self.source.placeholders[item.name]
            if not wants(kinds, item.name):
                continue
            if item.runs:
                rows[item.name] += item.rows
            else:
                media.setdefault(item.name, []).append(torch.zeros(item.shape))
        return Sample(meta.id, tokens, media, units={kind: {} for kind in rows}, unit_rows=rows)

    def _expanded(self, drawn: DrawnSample, kinds: Collection[str] | None, payloads: Iterator[Payload]) -> Payload:
        """The expanded payload; the next of `payloads` is its own, unless its metadata cannot be read."""
        if drawn.unreadable:
            return self.blank(drawn, kinds)
        payload = next(payloads)
        if isinstance(payload, Unreadable):
            return payload
        try:
            sample = expand_tokens(payload, drawn.given, drawn.meta, self.source.placeholders, kinds)
        except SampleError as error:
            return Unreadable(str(error))
        tokens = sample.tokens.numpy()
        low, high, vocab_size = int(tokens.min()), int(tokens.max()), self.source.vocab_size
        if low < 0 or high >= vocab_size:
            return Unreadable(
                f"sample {sample.id!r}: token ids {low}..{high} must be in 0..{vocab_size - 1} (vocab_size)"
            )
        return sample

    def __iter__(self) -> Iterator[DrawnBatch]:
        return self

    def __next__(self) -> DrawnBatch:
        """The global batch of the current step, which then advances. Never ends."""
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, what it depends on, and a few samples by their checksums."""
        place = self.place(self.step)
        return {"step": self.step, "sample": place, ORDER: self.order.until(place), **self._identity.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue with the samples that the loader which gave `state` would have drawn next, however many make a batch
        now. Returns and raises what `PositionIdentity.compare` does, and RecipeError: they came in another order."""
        repaired = self._identity.compare(state)
        place, before = int(state["sample"]), state.get(ORDER, "")
        if (now := self.order.until(place)) != before:
            raise RecipeError(
                f"{ELSEWHERE}: data.order and data.phases up to there were {before or 'none'!r} and are "
                f"{now or 'none'!r} (an order by length changes with training.seq_len, too); {RESTORE}"
            )
        self.step = int(state["step"])
        self._since = (self.step, place)
        return repaired

    def go_on_from(self, other: Loader) -> None:
        """Continue with the samples that `other`, of the same samples in the same order, would have drawn next."""
        self.step = other.step
        self._since = (other.step, other.place(other.step))

    @cached_property
    def _identity(self) -> PositionIdentity:
        return PositionIdentity(self.source, self.seed, self.shuffle, self.payloads.sources.reading)
