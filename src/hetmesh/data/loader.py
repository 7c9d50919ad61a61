"""The metadata-first loader: every rank knows every sample's shape, and loads only the samples that it processes.

The samples of a run are the source's, shuffled anew for each epoch, in one endless row that is cut into batches: a pure
function of the seed and a place in that row, which is what is saved. Lanes, microbatches and batch sizes may be others
when a run goes on from there. A batch may thus hold the end of one epoch and the start of the next; within
an epoch no sample is lost or repeated. (Only where epochs meet, or an epoch is smaller than a batch, can a sample be
twice in one batch.)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from hetmesh.data import probes
from hetmesh.data.expand import blank, expand_tokens
from hetmesh.data.expand_arrays import AsGiven, ExpandedArrays, Expander
from hetmesh.data.metas import metas_of
from hetmesh.data.payloads import Direct, Payload, Payloads, SplitSources, Unreadable, Wanted
from hetmesh.data.shuffle import permuted
from hetmesh.data.source import Sample, Source
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import MetaArrays, SampleMeta

_KEYS = {
    "seed": "debug.seed",
    "source_length": "the number of samples of data.source",
    "part_lengths": "the number of samples of each source of data.mixture",
    "shuffle": "the loader's shuffle",
}
"""What the values that a position depends on are called in a recipe."""


PROBES, PART_PROBES, PART_LENGTHS = "source", "parts", "part_lengths"
"""What a position calls the checksums of some samples, those of a mixture's sources, and how many samples these have.
Older positions do not have them."""

_ELSEWHERE = "the checkpoint's place in the data means other samples now"
_RESTORE = (
    "restore what was, or start a new run from the saved weights: checkpoint.initial_load_path and another "
    "job.dump_folder"
)

TRAIN, VALIDATION = "train", "validation"
"""The splits of a run."""

_SHOWN = 3  # samples that a message names


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """One sample of a global batch, before its payload is loaded.

    Attributes:
        index: its index in the source.
        given: its metadata as the source gives it.
        meta: its expanded metadata.
        dropped_media: media items that did not fit into `seq_len`.
        dropped_tokens: expanded tokens that did not fit into `seq_len`.
        unreadable: why not even its metadata can be read; a sample of one padding token stands for it. Else empty.
    """

    index: int
    given: SampleMeta
    meta: SampleMeta
    dropped_media: int = 0
    dropped_tokens: int = 0
    unreadable: str = ""


class DrawnBatch(Sequence[DrawnSample]):
    """Samples of a global batch, as arrays; `DrawnSample` are made of those that are asked for.

    Attributes:
        indices: their indices in the source.
        given: their metadata as the source gives it.
        metas: their expanded metadata.
        dropped_media, dropped_tokens: of each, int64 `[n]`; see `DrawnSample`.
        unreadable: why the metadata of some cannot be read, by their place here.
    """

    def __init__(
        self, indices: tuple[int, ...], given: MetaArrays, expanded: ExpandedArrays, unreadable: Mapping[int, str]
    ) -> None:
        self.indices, self.given, self.unreadable = indices, given, unreadable
        self.metas = expanded.metas
        self.dropped_media, self.dropped_tokens = expanded.dropped_media, expanded.dropped_tokens

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> DrawnSample: ...
    @overload
    def __getitem__(self, index: slice) -> DrawnBatch: ...
    def __getitem__(self, index: int | slice) -> DrawnSample | DrawnBatch:
        if isinstance(index, slice):
            return self._part(range(len(self))[index])
        meta = self.metas[index]
        i = index + len(self) if index < 0 else index
        return DrawnSample(
            self.indices[i],
            self.given[i],
            meta,
            int(self.dropped_media[i]),
            int(self.dropped_tokens[i]),
            self.unreadable.get(i, ""),
        )

    def _part(self, places: range) -> DrawnBatch:
        expanded = ExpandedArrays(self.metas.take(places), self.dropped_media[places], self.dropped_tokens[places])
        unreadable = {at: self.unreadable[i] for at, i in enumerate(places) if i in self.unreadable}
        return DrawnBatch(tuple(self.indices[i] for i in places), self.given.take(places), expanded, unreadable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrawnBatch) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Loader:
    """Draws global batches from a source; an iterator whose position can be saved.

    Args:
        source: where samples come from.
        global_batch_size: samples per step.
        prepare: from a source's metadata to the expanded. None leaves samples as the source gives them.
        seed: chooses the shuffles.
        shuffle: False keeps the source's order in every epoch.
        payloads: where samples are loaded; None: in this process, when they are asked for.
        split: what `source` is called among the sources of `payloads`.
        skip: a sample whose metadata cannot be read is drawn as `DrawnSample.unreadable`, not an error.

    Raises:
        RecipeError: a batch size below 1 or an empty source.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        prepare: Expander | AsGiven | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        payloads: Payloads | None = None,
        split: str = TRAIN,
        skip: bool = False,
    ) -> None:
        if global_batch_size < 1:
            raise RecipeError(f"[training] global_batch_size = {global_batch_size} must be at least 1")
        if len(source) < 1:
            raise RecipeError(f"[data] source: {type(source).__name__} is empty, need at least 1 sample")
        self.source = source
        self.global_batch_size = global_batch_size
        self.prepare = prepare or AsGiven()
        self.seed = seed
        self.shuffle = shuffle
        self.payloads = payloads or Direct(SplitSources({split: lambda: source}))
        self.split, self.skip = split, skip
        self.step = 0
        """The step whose batch `next` gives."""
        self._since = (0, 0)  # a step, and the place of its first sample in the endless row

    def indices(self, step: int) -> tuple[int, ...]:
        """Source indices of the global batch at `step`, in order.

        Raises:
            ValueError: `step` is before the one at which this run was resumed (or 0).
        """
        size = len(self.source)
        found: list[int] = []
        first = self.place(step)
        stop = first + self.global_batch_size
        while first < stop:
            epoch, offset = divmod(first, size)
            positions = range(offset, min(offset + stop - first, size))
            found += permuted(positions, size, self.seed, epoch) if self.shuffle else positions
            first += len(positions)
        return tuple(found)

    def place(self, step: int) -> int:
        """The place of the first sample of `step` in the endless row of samples."""
        since, sample = self._since
        if step < since:
            raise ValueError(f"step {step} lies before step {since}, where the data position was restored")
        return sample + (step - since) * self.global_batch_size

    def batch(self, step: int) -> DrawnBatch:
        """The global batch at `step`: the same on every rank, and no payload is loaded.

        Raises:
            SampleError: a sample's metadata is malformed or does not suit the modules.
        """
        return self.drawn(self.indices(step))

    def drawn(self, indices: Sequence[int]) -> DrawnBatch:
        """The prepared metadata of some samples of the source.

        Raises:
            SampleError: as `batch`.
        """
        given = metas_of(self.source, indices, self.payloads.sources.reading)
        unreadable: dict[int, str] = {}
        for i in self.prepare.refused(given).tolist():
            try:
                self.prepare(given.meta(i))
            except SampleError as error:
                if not self.skip:
                    raise
                unreadable[i] = str(error)
        if unreadable:
            blanks = {i: SampleMeta(f"unreadable-{indices[i]}", 1) for i in unreadable}
            given = MetaArrays.of([blanks.get(i) or given.meta(i) for i in range(len(given))])
        expanded = self.prepare.all(given)
        return DrawnBatch(tuple(indices), given, expanded, unreadable)

    def load(self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None) -> list[Sample]:
        """The expanded payloads of the samples asked for, in that order.

        Args:
            kinds: by source index, the kinds of media that are wanted; None: all.

        Raises:
            SampleError: a payload does not agree with its metadata, or holds a token outside the vocabulary.
        """
        found = self.try_load(drawn, kinds)
        for each in found:
            if isinstance(each, Unreadable):
                raise SampleError(each.message)
        return [each for each in found if not isinstance(each, Unreadable)]

    def try_load(
        self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None
    ) -> list[Payload]:
        """The same, with the reason in place of what `load` refuses."""
        drawn = list(drawn)
        wanted = self.wanted(drawn, kinds)
        found = iter(self.payloads.get(wanted))
        return [
            self._checked(d, None if kinds is None else kinds[d.index], None if d.unreadable else next(found))
            for d in drawn
        ]

    def wanted(self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None) -> list[Wanted]:
        """What `load` asks `payloads` for, which may be told beforehand."""
        return [
            Wanted(self.split, d.index, None if kinds is None else tuple(sorted(kinds[d.index])))
            for d in drawn
            if not d.unreadable
        ]

    def blank(self, drawn: DrawnSample, kinds: Collection[str] | None) -> Sample:
        """What stands for a sample that cannot be read."""
        return blank(drawn.meta, self.source.placeholders, self.source.pad_id, kinds)

    def _checked(self, drawn: DrawnSample, kinds: Collection[str] | None, found: Payload | None) -> Payload:
        """The expanded payload."""
        if found is None:
            return self.blank(drawn, kinds)
        if isinstance(found, Unreadable):
            return found
        try:
            return self._expanded(drawn, kinds, found)
        except SampleError as error:
            return Unreadable(str(error))

    def _expanded(self, drawn: DrawnSample, kinds: Collection[str] | None, found: Sample) -> Sample:
        source = self.source
        sample = expand_tokens(found, drawn.given, drawn.meta, source.placeholders, kinds)
        tokens = sample.tokens.numpy()
        low, high = tokens.min(), tokens.max()
        if low < 0 or high >= source.vocab_size:
            raise SampleError(
                f"sample {sample.id!r}: token ids {int(low)}..{int(high)} must be in 0..{source.vocab_size - 1} "
                f"(vocab_size)"
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
        return {"step": self.step, "sample": self.place(self.step), **self._identity(), self._probes_key: self._probes}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue where the loader that gave `state` was: the samples that come next are those that it would have
        drawn, however many make a batch now.

        Returns:
            Which of the samples looked at are others, a line for each source; few enough to have been mended.

        Raises:
            RecipeError: seed, order or lengths of sources differ, or a source has other samples at the same places
                (more than a few), so that the samples would not be the same ones.
        """
        identity = self._identity()
        missing = {"step", "sample", *identity} - set(state) - {PART_LENGTHS}
        if missing:
            raise RecipeError(f"checkpoint: the data position lacks {sorted(missing)}; it has {sorted(state)}")
        differs = {k: (state[k], v) for k, v in identity.items() if k in state and state[k] != v}
        if differs:
            told = ", ".join(f"{_KEYS[k]} was {old} and is {new}" for k, (old, new) in differs.items())
            raise RecipeError(f"{_ELSEWHERE}: {told}; {_RESTORE}")
        mended: list[str] = []
        before = state.get(self._probes_key)
        if before is not None and before != self._probes:
            others, mended = probes.compared(self._looked_at, before, self._probes)
            if others:
                raise RecipeError(
                    f"{_ELSEWHERE}: {others[0]}: it was sorted, its text becomes other tokens, or it is another one; "
                    f"{_RESTORE}"
                )
        self.step = int(state["step"])
        self._since = (self.step, int(state["sample"]))
        return mended

    @property
    def _probes_key(self) -> str:
        return PART_PROBES if probes.lengths(self.source) else PROBES

    @cached_property
    def _looked_at(self) -> probes.Groups:
        return probes.looked_at(self.source)

    @cached_property
    def _probes(self) -> str:
        indices = itertools.chain(*self._looked_at.values())
        return probes.checksums(self.source, indices, self.payloads.sources.reading)

    def _identity(self) -> dict[str, Any]:
        parts = probes.lengths(self.source)
        own = {"seed": self.seed, "source_length": len(self.source), "shuffle": int(self.shuffle)}
        return own | ({PART_LENGTHS: parts} if parts else {})


def describe_without_targets(drawn: DrawnBatch, which: Sequence[int], seq_len: int) -> str:
    """Samples without a target token by their ids, and why they have none.

    Args:
        which: their places in `drawn`.
    """
    shown = ", ".join(repr(drawn.given.ids[i]) for i in which[:_SHOWN])
    more = f" and {len(which) - _SHOWN} more" if len(which) > _SHOWN else ""
    cut = int((drawn.given.num_targets[list(which)] > 0).sum())
    why = f" (training.seq_len = {seq_len} cuts the targets of {cut})" if cut else " (the data source gives them none)"
    return f"{'sample' if len(which) == 1 else 'samples'} {shown}{more}{why}"
