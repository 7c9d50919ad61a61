"""A weighted mixture of sources as one source."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetmesh.data.source import Sample, Source, SourceAbilities, abilities_of
from hetmesh.errors import RecipeError
from hetmesh.graph.sample import SampleMeta

KEY = "[[data.mixture]]"


class MixtureSource:
    """Samples of several sources in the proportion of their weights. Ids begin with the name of the source.

    One epoch is as long as it takes for every sample of every source to come once: it has `length x share` samples of
    each. Sources that are small for their share start over meanwhile, so that in an epoch none of their samples comes
    twice more often than another. The order is the loader's, which draws from the whole epoch at random, so a position
    in the data is one in a mixture too.

    Args:
        weights: how many samples come from each source, in any unit, above 0; None: each sample once.

    Raises:
        RecipeError: vocabularies, padding, placeholders or values differ.
    """

    def __init__(self, parts: Mapping[str, Source], weights: Mapping[str, float] | None = None) -> None:
        self.parts = dict(parts)
        self.names = tuple(parts)
        lengths = [len(source) for source in self.parts.values()]
        weights = dict(zip(self.names, lengths, strict=True)) if weights is None else weights
        total = sum(weights[name] for name in self.names)
        shares = [weights[name] / total for name in self.names]
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
        for first, name in itertools.combinations(self.names, 2):
            a, b = self.parts[first], self.parts[name]
            pairs = [("vocab_size", a.vocab_size, b.vocab_size), ("pad_id", a.pad_id, b.pad_id)]
            theirs = b.placeholders
            pairs += [(f"placeholder {k!r}", token, theirs.get(k, token)) for k, token in a.placeholders.items()]
            for what, x, y in pairs:
                if x != y:
                    raise RecipeError(f"{KEY} {first!r} and {name!r} must have one vocabulary: {what} is {x} and {y}")
            values = [sorted(abilities_of(source).values) for source in (a, b)]
            if values[0] != values[1]:
                raise RecipeError(f"{KEY} {first!r} and {name!r} must have the same values, got {values}")

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
        name, at = self.place(index)
        meta = self.parts[name].meta(at)
        return replace(meta, id=f"{name}/{meta.id}")

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        name, at = self.place(index)
        sample = self.parts[name].load(at, kinds)
        return replace(sample, id=f"{name}/{sample.id}")

    @property
    def abilities(self) -> SourceAbilities:
        """Those of its sources together; what decodes a text depends on the sample that it is of."""
        parts = {name: abilities_of(source) for name, source in self.parts.items()}

        def check_files(index: int, kinds: Collection[str] | None) -> Sequence[str]:
            name, at = self.place(index)
            look = parts[name].check_files
            return [] if look is None else look(at, kinds) or []

        return SourceAbilities(
            check_files=check_files,
            end_ids=lambda: [token for part in parts.values() for token in part.end_ids()],
            notes=lambda: dict.fromkeys(note for part in parts.values() for note in part.notes()),
            values=parts[self.names[0]].values,
            media_shapes={kind: shape for part in parts.values() for kind, shape in part.media_shapes.items()},
        )

    def counts(self, indices: Sequence[int]) -> dict[str, int]:
        """How many of these samples come from each source."""
        places = Counter(self.place(index)[0] for index in indices)
        return {name: places[name] for name in self.names}
