"""What a data source is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from hetmesh.graph.sample import SampleMeta


@dataclass(frozen=True)
class Sample:
    """The payload of one sample.

    Attributes:
        id: the id of its `SampleMeta`.
        tokens: int64 `[tokens]` on the CPU, placeholders included.
        media: per kind of media, the raw tensors in the order of their positions; kinds without items may be absent.
        bytes_read: what was read from files to make it.
        bytes_needed: the stored size of what was asked for: its text, and its media of the kinds wanted.
    """

    id: str
    tokens: Tensor
    media: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_needed: int = 0


def wants(kinds: Collection[str] | None, kind: str) -> bool:
    """Whether media of `kind` are among those asked for; None asks for all."""
    return kinds is None or kind in kinds


@runtime_checkable
class Source(Protocol):
    """An indexed collection of samples. Every rank makes its own; all must agree, so nothing may depend on the rank,
    on time or on the order of calls.

    Plain attributes do for the properties.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size-1`."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that fills batches; it never carries loss."""
        ...

    @property
    def placeholders(self) -> Mapping[str, int]:
        """Kind of media -> token id of its placeholder."""
        ...

    def __len__(self) -> int:
        """Samples of one epoch."""
        ...

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`, without loading its payload: every rank calls this for the whole global batch.
        Each media item has one placeholder token, or already as many as its encoder makes rows.
        """
        ...

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """The payload of sample `index`; agrees with `meta(index)`.

        Args:
            kinds: the kinds of media that are wanted; None: all. No others are read: `()` loads the tokens alone.
        """
        ...


@runtime_checkable
class PromptSource(Protocol):
    """A source that can make a sample of a question that somebody asks, in the form that its own samples have."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end an answer."""
        ...

    def prompt(self, text: str, media: Sequence[tuple[str, Path]]) -> tuple[SampleMeta, Sample]:
        """A question without its answer.

        Args:
            text: the question.
            media: kind and file of each item, in order.

        Raises:
            SampleError: the question cannot be asked, or a file cannot be read.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token."""
        ...


@runtime_checkable
class QuestionSource(Source, Protocol):
    """A source of questions with one right answer each, which evaluation can show and score by kind."""

    def kind(self, index: int) -> str:
        """The kind of question that sample `index` asks."""
        ...

    def question(self, index: int) -> str:
        """The text before the answer."""
        ...

    def answer(self, index: int) -> str:
        """The right answer, without the end token."""
        ...

    def picture(self, index: int) -> str:
        """The sample's media as text art, empty without media."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token."""
        ...
