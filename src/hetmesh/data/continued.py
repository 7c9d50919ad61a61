"""Samples whose last answer is being written: what a model says so far in the place of what it should say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from hetmesh.data.source import Sample, Source
from hetmesh.graph.sample import SampleMeta


class Continued:
    """Some samples of `base`, each up to its last answer, then the tokens of `answers`, then one of padding, whose
    prediction is the next token. A sample without targets is a question as a whole.

    Behind the padding there is nothing, and nothing before it sees it, so it changes no other prediction. Answers count
    as targets, so masks that depend on where these begin are those of training.

    Args:
        base: where samples come from.
        indices: which of them.
        answers: of each, the tokens so far.
    """

    def __init__(self, base: Source, indices: Sequence[int], answers: Sequence[Sequence[int]]) -> None:
        self.base, self.indices, self.answers = base, tuple(indices), tuple(map(tuple, answers))
        self.pad_id = base.pad_id
        # A model may have more tokens than its tokenizer, and say them.
        self.vocab_size = max([base.vocab_size, *(token + 1 for answer in self.answers for token in answer)])
        self.placeholders: Mapping[str, int] = base.placeholders

    def __len__(self) -> int:
        return len(self.indices)

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`: that of the base up to its last answer, with a longer end."""
        given = self.base.meta(self.indices[index])
        start = answer_start(given)
        stop = start + len(self.answers[index]) + 1
        before = tuple(span for span in given.targets if span[1] <= start)
        media = tuple(item for item in given.media if item.position < start)
        return replace(given, tokens=stop, media=media, targets=(*before, (start, stop)))

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """The payload of sample `index`."""
        sample, meta = self.base.load(self.indices[index], kinds), self.meta(index)
        written = torch.tensor([*self.answers[index], self.pad_id])
        tokens = torch.cat([sample.tokens[: meta.targets[-1][0]], written])
        media = {kind: tuple(items)[: meta.num_items(kind)] for kind, items in sample.media.items()}
        return replace(sample, tokens=tokens, media=media)


def answer_start(meta: SampleMeta) -> int:
    """Where the last answer of a sample begins: its last span of targets, or its end where it has none."""
    return meta.targets[-1][0] if meta.targets else meta.tokens
