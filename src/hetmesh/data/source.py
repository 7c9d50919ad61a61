"""What a data source is, and how a recipe names one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hetmesh.errors import RecipeError
from hetmesh.graph.sample import SampleMeta


@dataclass(frozen=True)
class Sample:
    """The payload of one sample.

    Attributes:
        id: the id of its `SampleMeta`.
        tokens: int64 `[tokens]` on the CPU, placeholders included.
        media: per kind of media, the raw tensors in the order of their positions; kinds without items may be absent.
    """

    id: str
    tokens: Tensor
    media: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


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

    def load(self, index: int) -> Sample:
        """The payload of sample `index`; agrees with `meta(index)`."""
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


def _builtin() -> dict[str, Callable[..., Source]]:
    from hetmesh.data.digits import DigitsSource

    return {"digits": DigitsSource}


def make_source(name: str, /, **options: Any) -> Source:
    """Make the source that a recipe names.

    Args:
        name: `"digits"`, or `"package.module:Class"` for the user's own class or function.
        options: keyword arguments for it.

    Raises:
        RecipeError: nothing has that name, it does not take these options, or the result is not a `Source`.
    """
    key = f"[data] source = {name!r}"
    factory = _import(name, key) if ":" in name else _builtin().get(name)
    if factory is None:
        raise RecipeError(f"{key}: no such source; valid are {sorted(_builtin())} and 'package.module:Class'")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-in callables have none; calling them tells
        signature = None
    if signature is not None:
        try:
            signature.bind(**options)
        except TypeError as error:
            raise RecipeError(f"{key}: options {options}: {error}; it takes {signature}") from error
    source = factory(**options)
    missing = [n for n in ("__len__", "meta", "load", "vocab_size", "pad_id", "placeholders") if not hasattr(source, n)]
    if missing:
        raise RecipeError(f"{key}: {type(source).__name__} is not a hetmesh.data.Source, it lacks {missing}")
    ids = {"pad_id": source.pad_id, **{f"placeholder {k!r}": v for k, v in source.placeholders.items()}}
    wrong = {k: v for k, v in ids.items() if not 0 <= v < source.vocab_size}
    if wrong:
        raise RecipeError(f"{key}: {wrong} must be token ids 0..{source.vocab_size - 1} (vocab_size)")
    if len(source) < 1:
        raise RecipeError(f"{key}: the source is empty")
    return source


def _import(name: str, key: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"{key}: cannot import it: {error}; write 'package.module:Class'") from error
    if not callable(found):
        raise RecipeError(f"{key}: {attribute} is a {type(found).__name__}, not a class or function")
    return found
