"""A data source of random samples with any kinds of media, for tests of layouts.

In a recipe: `source = "hetmesh.testing.sources:RandomMedia"`, its arguments under `[data.options]`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from hetmesh.data.source import Sample, wants
from hetmesh.errors import RecipeError
from hetmesh.graph import MediaItem, SampleMeta


class RandomMedia:
    """Samples of random length with 0 to `max_items` media items of each kind, one placeholder token each.

    Args:
        kinds: kind of media -> raw shape of its items.
        same: kind -> another kind whose very items it repeats (for one encoder that feeds two placeholders).
        max_items: most items per kind and sample.
        items: exactly this many instead, for runs where every sample must have the same rows.
        text_only: share of samples without media.
        max_text: most text tokens; each sample has at least 2.
        largest: kind -> raw shape of its largest items; each side of an item is then a random multiple, up to that, of
            the one in `kinds`.
        without_targets: share of samples without a target.
        apart: every item has a text token after it, as chat templates have it.
        length: samples in the source.
        held_out: samples of its validation split, which are others; 0: it has none.
        split: "train" or "validation".
        seed: another seed gives other samples.

    Raises:
        RecipeError: an option that is not valid.
    """

    pad_id = 0

    def __init__(
        self,
        kinds: Mapping[str, Sequence[int]],
        same: Mapping[str, str] | None = None,
        *,
        max_items: int = 3,
        items: int | None = None,
        text_only: float = 0.3,
        max_text: int = 9,
        largest: Mapping[str, Sequence[int]] | None = None,
        without_targets: float = 0.0,
        apart: bool = False,
        length: int = 1000,
        held_out: int = 0,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        if split != "train" and not held_out:
            raise RecipeError(f"[data.options] split = {split!r}: without held_out there is none but 'train'")
        _check_options(kinds, text_only, {"max_items": max_items, "max_text": max_text, "length": length, "seed": seed})
        self.kinds = {name: tuple(shape) for name, shape in kinds.items()}
        self.same = dict(same or {})
        self.largest = dict(largest or {})
        self.max_items, self.items, self.text_only, self.max_text = max_items, items, text_only, max_text
        self.without_targets, self.apart = without_targets, apart
        self.length, self.seed = (length, str(seed)) if split == "train" else (held_out, f"{split}-{seed}")
        self.placeholders = {name: 1 + i for i, name in enumerate([*self.kinds, *self.same])}
        self.words = self.vocab_size = 12 + len(self.placeholders)

    def __len__(self) -> int:
        return self.length

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`: shuffled text tokens and placeholders; the last tokens are targets."""
        return self._make(index)[0]

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        whole = self._make(index)[1]
        return replace(whole, media={kind: items for kind, items in whole.media.items() if wants(kinds, kind)})

    def _make(self, index: int) -> tuple[SampleMeta, Sample]:
        rng = random.Random(f"{self.seed}:{index}")
        sequence = self.sequence(rng)
        first = len(self.placeholders) + 1
        tokens = [self.placeholders[name] if name else rng.randint(first, self.words - 1) for name in sequence]
        shapes = {name: [self._shape(name, rng) for _ in range(sequence.count(name))] for name in self.kinds}
        shapes |= {name: shapes[other] for name, other in self.same.items()}
        left = {name: iter(of_kind) for name, of_kind in shapes.items()}
        placed = [(at, name) for at, name in enumerate(sequence) if name]
        media = tuple(MediaItem(name, next(left[name]), at) for at, name in placed)
        stop = len(sequence)
        targets = self.targets(index, rng, stop)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        payload = {name: [torch.randn(shape, generator=generator) for shape in shapes[name]] for name in self.kinds}
        payload |= {name: payload[other] for name, other in self.same.items()}
        identity = f"random-{self.seed}-{index}"
        return SampleMeta(identity, stop, media, targets), Sample(identity, torch.tensor(tokens), payload)

    def sequence(self, rng: random.Random) -> list[str | None]:
        """What a sample consists of: kinds of media, and None for a token of text."""
        without = self.items is None and rng.random() < self.text_only
        counts = {name: 0 if without else self._count(rng) for name in self.kinds}
        counts |= {name: counts[other] for name, other in self.same.items()}
        sequence: list[str | None] = [name for name, n in counts.items() for _ in range(n)]
        sequence += [None] * rng.randint(0, self.max_text - 2)
        rng.shuffle(sequence)
        if self.apart:
            sequence = [token for name in sequence for token in ([name, None] if name else [None])]
        return [*sequence, None, None]

    def targets(self, index: int, rng: random.Random, stop: int) -> tuple[tuple[int, int], ...]:
        """Of a sample of `stop` tokens: the last, or the last two, or none."""
        start = max(1, stop - rng.randint(1, 2))
        without = random.Random(f"{self.seed}:{index}:targets").random() < self.without_targets
        return () if without else ((start, stop),)

    def _shape(self, name: str, rng: random.Random) -> tuple[int, ...]:
        shape = self.kinds[name]
        if name in self.largest:
            shape = tuple(n * rng.randint(1, most // n) for n, most in zip(shape, self.largest[name], strict=True))
        return shape

    def _count(self, rng: random.Random) -> int:
        return rng.randint(0, self.max_items) if self.items is None else self.items


def _check_options(kinds: object, text_only: object, counts: Mapping[str, object]) -> None:
    key = "[data.options]"
    shapes = list(kinds.values()) if isinstance(kinds, Mapping) else [None]
    if not all(isinstance(s, Sequence) and all(type(n) is int and n > 0 for n in s) for s in shapes):
        raise RecipeError(f"{key} kinds: must give each kind of media the shape of its items, got {kinds!r}")
    if not isinstance(text_only, int | float) or not 0 <= text_only <= 1:
        raise RecipeError(f"{key} text_only: must be in 0..1, got {text_only!r}")
    least = {"max_text": 2, "length": 1}
    most = {"max_items": 1000, "max_text": 100_000}  # of a sample that is drawn whole when it is looked at
    for name, value in counts.items():
        low, high = least.get(name, 0), most.get(name, 2**63)
        if type(value) is not int or not low <= value <= high:
            upper = f" and at most {high}" if name in most else ""
            raise RecipeError(f"{key} {name}: must be a number of at least {low}{upper}, got {value!r}")
