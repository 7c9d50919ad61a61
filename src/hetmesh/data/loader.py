"""The metadata-first loader: every rank knows every sample's shape, and loads only the samples that it processes.

The global batch of a step is a pure function of `(seed, step)`: the source's samples, shuffled anew for each epoch, in
one endless row that is cut into batches. A batch may thus hold the end of one epoch and the start of the next; within
an epoch no sample is lost or repeated. (Only where epochs meet, or an epoch is smaller than a batch, can a sample be
twice in one batch.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetmesh.data.expand import Expansion, expand_tokens
from hetmesh.data.shuffle import permuted
from hetmesh.data.source import Sample, Source
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import SampleMeta

_KEYS = {
    "seed": "debug.seed",
    "global_batch_size": "training.global_batch_size",
    "source_length": "the number of samples of data.source",
    "shuffle": "the loader's shuffle",
}
"""What the values that a position depends on are called in a recipe."""


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
    """

    index: int
    given: SampleMeta
    meta: SampleMeta
    dropped_media: int = 0
    dropped_tokens: int = 0


class Loader:
    """Draws global batches from a source; an iterator whose position can be saved.

    Args:
        source: where samples come from.
        global_batch_size: samples per step.
        prepare: from a source's metadata to the expanded; usually `functools.partial(expand, item_rows=...)`. None
            leaves samples as the source gives them.
        seed: chooses the shuffles.
        shuffle: False keeps the source's order in every epoch.

    Raises:
        RecipeError: a batch size below 1 or an empty source.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        prepare: Callable[[SampleMeta], Expansion] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if global_batch_size < 1:
            raise RecipeError(f"[training] global_batch_size = {global_batch_size} must be at least 1")
        if len(source) < 1:
            raise RecipeError(f"[data] source: {type(source).__name__} is empty, need at least 1 sample")
        self.source = source
        self.global_batch_size = global_batch_size
        self.prepare = prepare or Expansion
        self.seed = seed
        self.shuffle = shuffle
        self.step = 0
        """The step whose batch `next` gives."""

    def indices(self, step: int) -> tuple[int, ...]:
        """Source indices of the global batch at `step` (0, 1, ...), in order."""
        size = len(self.source)
        found: list[int] = []
        first, stop = step * self.global_batch_size, (step + 1) * self.global_batch_size
        while first < stop:
            epoch, offset = divmod(first, size)
            positions = range(offset, min(offset + stop - first, size))
            found += permuted(positions, size, self.seed, epoch) if self.shuffle else positions
            first += len(positions)
        return tuple(found)

    def batch(self, step: int) -> tuple[DrawnSample, ...]:
        """The global batch at `step`: the same on every rank, and no payload is loaded.

        Raises:
            SampleError: a sample's metadata is malformed or does not suit the modules.
        """
        return tuple(self.draw(index) for index in self.indices(step))

    def draw(self, index: int) -> DrawnSample:
        """The prepared metadata of source sample `index`."""
        given = self.source.meta(index)
        result = self.prepare(given)
        return DrawnSample(index, given, result.meta, len(result.dropped_media), result.dropped_tokens)

    def load(self, drawn: Iterable[DrawnSample], kinds: Mapping[int, Collection[str]] | None = None) -> list[Sample]:
        """The expanded payloads of the samples asked for, in that order.

        Args:
            kinds: by source index, the kinds of media that are wanted; None: all.

        Raises:
            SampleError: a payload does not agree with its metadata, or holds a token outside the vocabulary.
        """
        return [self._load(d, None if kinds is None else kinds[d.index]) for d in drawn]

    def _load(self, drawn: DrawnSample, kinds: Collection[str] | None) -> Sample:
        source = self.source
        sample = expand_tokens(source.load(drawn.index, kinds), drawn.given, drawn.meta, source.placeholders, kinds)
        tokens = sample.tokens.numpy()
        low, high = tokens.min(), tokens.max()
        if low < 0 or high >= source.vocab_size:
            raise SampleError(
                f"sample {sample.id!r}: token ids {int(low)}..{int(high)} must be in 0..{source.vocab_size - 1} "
                f"(vocab_size)"
            )
        return sample

    def __iter__(self) -> Iterator[tuple[DrawnSample, ...]]:
        return self

    def __next__(self) -> tuple[DrawnSample, ...]:
        """The global batch of the current step, which then advances. Never ends."""
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """The position, and what it depends on."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where the loader that gave `state` was: its next batch comes next.

        Raises:
            RecipeError: seed, batch size, order or source length differ, so that batches would not be the same ones.
        """
        identity = self._identity()
        missing = {"step", *identity} - set(state)
        if missing:
            raise RecipeError(f"checkpoint: the data position lacks {sorted(missing)}; it has {sorted(state)}")
        differs = {k: (state[k], v) for k, v in identity.items() if state[k] != v}
        if differs:
            told = ", ".join(f"{_KEYS[k]} was {old} and is {new}" for k, (old, new) in differs.items())
            raise RecipeError(
                f"the checkpoint's place in the data means other samples now: {told}; restore what was, or start a new "
                "run from the saved weights: checkpoint.initial_load_path and another job.dump_folder"
            )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "source_length": len(self.source),
            "shuffle": int(self.shuffle),
        }


def describe_without_targets(samples: Sequence[DrawnSample], seq_len: int) -> str:
    """Samples without a target token by their ids, and why they have none."""
    shown = ", ".join(repr(d.meta.id) for d in samples[:_SHOWN])
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    cut = sum(bool(d.given.targets) for d in samples)
    why = f" (training.seq_len = {seq_len} cuts the targets of {cut})" if cut else " (the data source gives them none)"
    return f"{'sample' if len(samples) == 1 else 'samples'} {shown}{more}{why}"
