"""Samples that are in memory already, for scripts and tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hetmesh.data.check import check_meta, check_sample
from hetmesh.data.source import Sample, wants
from hetmesh.graph.sample import SampleMeta


class MemorySource:
    """A source of given samples. Worker processes that are forked share them; others get a copy.

    Args:
        samples: metadata and payload of each.
        vocab_size: token ids are `0..vocab_size-1`.
        placeholders: kind of media -> token id of its placeholder.
        pad_id: the token that fills batches.

    Raises:
        SampleError: a sample is malformed, or its payload and metadata disagree.
    """

    def __init__(
        self,
        samples: Sequence[tuple[SampleMeta, Sample]],
        vocab_size: int,
        placeholders: Mapping[str, int],
        pad_id: int = 0,
    ) -> None:
        self.vocab_size, self.pad_id, self.placeholders = vocab_size, pad_id, dict(placeholders)
        for meta, sample in samples:
            check_meta(meta)
            check_sample(sample, meta, placeholders)
        self._samples = tuple(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`."""
        return self._samples[index][0]

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """The payload of sample `index`."""
        sample = self._samples[index][1]
        return replace(sample, media={kind: items for kind, items in sample.media.items() if wants(kinds, kind)})
