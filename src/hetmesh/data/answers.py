"""Answers: where they begin, which tokens end them, and samples whose last one is being written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hetmesh.data.source import Sample, Source, abilities_of, units_left
from hetmesh.files import json_object
from hetmesh.graph.sample import SampleMeta
from hetmesh.models import pretrained_of
from hetmesh.recipe.recipe import Recipe


def answer_start(meta: SampleMeta) -> int:
    """Where the last answer of a sample begins: its last span of targets, or its end where it has none."""
    return meta.targets[-1][0] if meta.targets else meta.tokens


def end_tokens(source: Source, recipe: Recipe) -> frozenset[int]:
    """Tokens that end an answer: the source's, and those of generation_config.json in the LLM's directory."""
    pretrained = pretrained_of(recipe.llm, recipe.modules[recipe.llm])
    configured = set() if pretrained is None else configured_end_tokens(pretrained.path)
    return frozenset(abilities_of(source).end_ids()) | configured


def configured_end_tokens(folder: Path) -> set[int]:
    """Those that the generation_config.json of a directory names. Raises RecipeError: it cannot be read."""
    file = folder / "generation_config.json"
    value = json_object(file, folder).get("eos_token_id") if file.is_file() else None
    return {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}


class Continued:
    """The samples `indices` of `base`, each up to its last answer, then its tokens of `answers`, then one of padding,
    whose prediction is the next token. A sample without targets is a question as a whole.

    Nothing comes after the padding, and nothing before it sees it, so it changes no other prediction. Answers count
    as targets, so masks that depend on where these begin are those of training."""

    def __init__(self, base: Source, indices: Sequence[int], answers: Sequence[Sequence[int]]) -> None:
        self.base, self.indices, self.answers = base, tuple(indices), tuple(map(tuple, answers))
        self.pad_id = base.pad_id
        # A model may have more tokens than its tokenizer, and say them.
        self.vocab_size = max([base.vocab_size, *(token + 1 for answer in self.answers for token in answer)])
        self.placeholders: Mapping[str, int] = base.placeholders
        self.values = abilities_of(base).values

    def __len__(self) -> int:
        return len(self.indices)

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`: that of the base up to its last answer, with a longer end."""
        meta = self.base.meta(self.indices[index])
        start = answer_start(meta)
        stop = start + len(self.answers[index]) + 1
        earlier = tuple(span for span in meta.targets if span[1] <= start)
        media = tuple(item for item in meta.media if item.position < start)
        return replace(meta, tokens=stop, media=media, targets=(*earlier, (start, stop)))

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        sample, meta = self.base.load(self.indices[index], kinds), self.meta(index)
        sample = units_left(sample, self.base.meta(self.indices[index]), meta)
        written = torch.tensor([*self.answers[index], self.pad_id])
        tokens = torch.cat([sample.tokens[: meta.targets[-1][0]], written])
        media = {kind: tuple(items)[: meta.num_items(kind)] for kind, items in sample.media.items()}
        values = {name: value.new_ones(()) for name, value in sample.values.items()}  # of a loss that nobody reads
        return replace(sample, tokens=tokens, media=media, values=values)
