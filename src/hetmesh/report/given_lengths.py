"""Samples of which only the lengths are known, as the metadata that a recipe's modules would see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hetmesh.data.lengths import Lengths
from hetmesh.errors import RecipeError
from hetmesh.graph import MediaItem, ModuleGraph, SampleMeta
from hetmesh.models import Adapter


class GivenLengths:
    """The samples of a file of lengths under the modules of a recipe.

    An encoder's tokens are what it computes on; where several make a row that it hands on (Qwen3-VL merges four), rows
    are counted from them. What a module between gets follows from its encoder, unless the file says it. All tokens of a
    sample attend to each other in an encoder, as those of one image do, and every token of the LLM that is no row is a
    target. Raises RecipeError: a sample has no token for the sink.

    Attributes:
        rows: per module but the sink, the rows it emits for each sample, int64 `[samples]`.
        tokens: of the sink, int64 `[samples]`.
        notes: what had to be assumed.
    """

    def __init__(self, lengths: Lengths, graph: ModuleGraph, adapters: Mapping[str, Adapter], seq_len: int) -> None:
        self.lengths, self.graph = lengths, graph
        sink = graph.sink.name
        self.rows: dict[str, np.ndarray] = {}
        for name in graph.order:
            given, inputs = lengths.of(name), graph.inputs(name)
            if name == sink:
                continue
            if inputs and name not in lengths.modules:
                sizes, inverse = np.unique(self.rows[inputs[0].source], return_inverse=True)
                rows = [adapters[name].rows(n) if n else 0 for n in sizes.tolist()]
                self.rows[name] = np.array(rows, np.int64)[inverse]
            else:
                unit = 1 if inputs else adapters[name].abilities.tokens_per_row or 1
                self.rows[name] = -(-given // unit)
        self.tokens = lengths.of(sink)
        if (self.tokens < 1).any():
            line = int(lengths.lines[self.tokens.argmin()])
            valid = f"valid are 1 or more, as every sample goes through {sink!r}"
            raise RecipeError(f"{lengths.path}, line {line}, key {sink!r}: got 0 tokens; {valid}")
        self._edges = {b.at: b.source for b in graph.boundaries if b.at is not None}  # side outputs share a placeholder
        self.notes = tuple(self._checked(sink, seq_len))

    def __len__(self) -> int:
        return len(self.lengths)

    def meta(self, index: int) -> SampleMeta:
        """Sample `index`, expanded."""
        items: list[MediaItem] = []
        first = 1
        for at, source in self._edges.items():
            if count := int(self.rows[source][index]):
                items.append(MediaItem(at, (count,), first, count))
                first += count
        tokens = int(self.tokens[index])
        targets = ((first, tokens),) if first < tokens else ()
        rows = {name: int(rows[index]) for name, rows in self.rows.items()}
        return SampleMeta(f"line {self.lengths.lines[index]}", tokens, tuple(items), targets, rows)

    def batches(self, count: int, size: int, seed: int) -> Iterator[list[SampleMeta]]:
        """`count` batches of `size` samples: each sample once before any comes again."""
        rng = np.random.default_rng(seed)
        rounds = -(-count * size // len(self))
        order = np.concatenate([rng.permutation(len(self)) for _ in range(rounds)])
        for i in range(count):
            yield [self.meta(place) for place in order[i * size : (i + 1) * size].tolist()]

    def _checked(self, sink: str, seq_len: int) -> Iterator[str]:
        needed = 1 + sum((self.rows[source] for source in self._edges.values()), np.zeros_like(self.tokens))
        short = self.tokens < needed
        if short.any():
            first = int(short.argmax())
            yield (
                f"{short.sum()} of {len(self)} samples have fewer tokens of {sink!r} than rows that take the place of "
                f"one each (line {self.lengths.lines[first]}: {self.tokens[first]} tokens, {needed[first] - 1} rows): "
                f"they count as rows and one token. Rows belong to the tokens of {sink!r}"
            )
            self.tokens = np.maximum(self.tokens, needed)
        if (long := self.tokens > seq_len).any():
            longer = f"{long.sum()} of {len(self)} samples are longer than training.seq_len = {seq_len}"
            yield f"{longer}, to which training cuts them; here they are whole"
