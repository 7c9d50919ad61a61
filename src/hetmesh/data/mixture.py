"""A weighted mixture of sources as one source."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetmesh.data.source import Sample, Source
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import SampleMeta

KEY = "[[data.mixture]]"


class MixtureSource:
    """Samples of several sources, so many of each as its share says. Ids begin with the name of the source.

    One epoch is as long as it takes for every sample of every source to come once: it has `length x share` samples of
    each. The sources that are small for their share begin anew meanwhile, so that in an epoch none of their samples
    comes twice more often than another. The order is the loader's, which draws from the whole of an epoch at random; so
    a place in the data is a place in a mixture too.

    Args:
        parts: the sources by name.
        weights: how many samples come from each, in any unit; None: each sample once.

    Raises:
        RecipeError: a weight is not above 0, or vocabularies, padding or placeholders differ.
    """

    def __init__(self, parts: Mapping[str, Source], weights: Mapping[str, float] | None = None) -> None:
        self.parts = dict(parts)
        self.names = tuple(parts)
        lengths = [len(source) for source in self.parts.values()]
        given = dict(zip(self.names, lengths, strict=True)) if weights is None else weights
        for name in self.names:
            if not (given[name] > 0 and math.isfinite(given[name])):
                raise RecipeError(f"{KEY} weight = {given[name]} of {name!r}: must be above 0")
        total = sum(given[name] for name in self.names)
        shares = [given[name] / total for name in self.names]
        length = max(math.ceil(n / share - 1e-9) for n, share in zip(lengths, shares, strict=True))
        counts = [max(n, round(length * share)) for n, share in zip(lengths, shares, strict=True)]
        self._ends = np.cumsum(counts).tolist()
        self._check()
        first = self.parts[self.names[0]]
        self.vocab_size, self.pad_id = first.vocab_size, first.pad_id
        self.placeholders: dict[str, int] = {}
        for source in self.parts.values():
            self.placeholders |= dict(source.placeholders)

    def _check(self) -> None:
        first, *others = self.names
        for name in others:
            a, b = self.parts[first], self.parts[name]
            for what, x, y in (
                ("vocab_size", a.vocab_size, b.vocab_size),
                ("pad_id", a.pad_id, b.pad_id),
                *(
                    (f"placeholder {k!r}", a.placeholders[k], b.placeholders.get(k, a.placeholders[k]))
                    for k in a.placeholders
                ),
            ):
                if x != y:
                    raise RecipeError(f"{KEY} {first!r} and {name!r} must have one vocabulary: {what} is {x} and {y}")

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def starts(self) -> dict[str, int]:
        """The index of each source's first sample."""
        return dict(zip(self.names, [0, *self._ends], strict=False))

    def place(self, index: int) -> tuple[str, int]:
        """The source that sample `index` comes from, and its index there."""
        if not 0 <= index < len(self):
            raise IndexError(f"mixture: index {index} is not in 0..{len(self) - 1}")
        part = bisect.bisect(self._ends, index)
        name = self.names[part]
        return name, (index - (self._ends[part - 1] if part else 0)) % len(self.parts[name])

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`."""
        name, at = self.place(index)
        meta = self.parts[name].meta(at)
        return replace(meta, id=f"{name}/{meta.id}")

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """The payload of sample `index`."""
        name, at = self.place(index)
        sample = self.parts[name].load(at, kinds)
        return replace(sample, id=f"{name}/{sample.id}")

    def check_files(self, index: int, kinds: Collection[str] | None = None) -> list[str]:
        """`check_files` of the source of sample `index`, where it has one."""
        name, at = self.place(index)
        look = getattr(self.parts[name], "check_files", None)
        return [] if look is None else look(at, kinds) or []

    def counts(self, indices: Sequence[int]) -> dict[str, int]:
        """How many of these samples come from each source."""
        found = dict.fromkeys(self.names, 0)
        for index in indices:
            found[self.place(index)[0]] += 1
        return found
