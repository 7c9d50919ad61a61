"""What a data source is, what else some can do, the metadata of its samples as arrays, and checks of samples before any
module sees them: each error names the sample, what it has and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hetmesh.errors import SampleError
from hetmesh.graph.meta_arrays import MetaArrays
from hetmesh.graph.sample import MediaItem, SampleMeta


@dataclass(frozen=True)
class Sample:
    """The payload of one sample.

    Attributes:
        tokens: int64 `[tokens]` on the CPU, placeholders included.
        media: per kind of media, the raw tensors in the order of their positions; kinds without items may be absent.
        units: of placed items (`MediaItem.runs`) instead: kind -> all that a processor made of the sample's media of
            that kind together, by its own names (`pixel_values`, `image_grid_thw`). Of a sample that cannot be read an
            empty unit, which stands for rows of zeros.
        unit_rows: rows that each unit makes, those of items that were cut since included.
        bytes_read: what was read from files to make it.
        bytes_needed: the stored size of what was asked for: its text, and its media of the kinds wanted.
        values: numbers that a custom loss gets (`SourceAbilities.values`), float64: one, `[]`, or one for each target
            of its metadata, `[targets]`.
        load_s: seconds that reading and preparing it took.
        frames_decoded, frames_needed: of its videos; to be decoded for the frames that the processor wants.
    """

    id: str
    tokens: Tensor
    media: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_needed: int = 0
    units: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    unit_rows: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    load_s: float = 0.0
    frames_decoded: int = 0
    frames_needed: int = 0


COSTS = ("bytes_read", "bytes_needed", "load_s", "frames_decoded", "frames_needed")
"""What a sample has cost, which is added up."""

LEAVE_OUT = 'data.on_bad_sample = "skip" leaves out, and counts, what cannot be read'
"""How to go on where a sample ends the run."""


def wants(kinds: Collection[str] | None, kind: str) -> bool:
    """Whether media of `kind` are among those asked for; None asks for all."""
    return kinds is None or kind in kinds


def units_left(sample: Sample, whole: SampleMeta, left: SampleMeta, kinds: Collection[str] | None = None) -> Sample:
    """`sample`, whose metadata is `whole`, once its items are those of `left`: with the units of `kinds` (None: all) of
    which there is an item, and the rows that these make."""
    if not sample.units:
        return sample
    units = {kind: unit for kind, unit in sample.units.items() if wants(kinds, kind) and left.num_items(kind)}
    rows = {kind: sum(item.rows for item in whole.media if item.name == kind) for kind in units}
    rows |= {kind: sample.unit_rows[kind] for kind in units if kind in sample.unit_rows}
    return replace(sample, units=units, unit_rows=rows)


@runtime_checkable
class Source(Protocol):
    """An indexed collection of samples. Every rank makes its own; all must agree, so nothing may depend on the rank,
    on time or on the order of calls.

    Plain attributes do for the properties. What it can do besides is declared as `abilities` (`SourceAbilities`).
    """

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size-1`."""

    @property
    def pad_id(self) -> int:
        """The token that fills batches; it never carries loss."""

    @property
    def placeholders(self) -> Mapping[str, int]:
        """Kind of media -> token id of its placeholder."""

    def __len__(self) -> int:
        """Samples of one epoch."""

    def meta(self, index: int) -> SampleMeta:
        """Metadata of sample `index`, without loading its payload: every rank calls this for the whole global batch.
        Each media item has one placeholder token, or already as many as its encoder makes rows, or is placed."""

    def load(self, index: int, kinds: Collection[str] | None = None) -> Sample:
        """The payload of sample `index`, which agrees with `meta(index)`; no other media are read than those of `kinds`
        (None: all; `()`: the tokens alone)."""


@dataclass(frozen=True)
class SourceAbilities:
    """What only some sources can do. All of it is absent by default.

    Attributes:
        metas: the metadata of some samples as arrays, as `meta` gives it one by one.
        check_files: looks for the media files of sample `index`, of these kinds, and opens none; gives the extensions
            of files beside it that nobody reads. Raises SampleError where one is not there.
        decode: the text of token ids up to the first end token.
        end_ids: tokens that end an answer.
        notes: what `hetmesh check` says of the form of its samples.
        values: the names of numbers that every sample has for a custom loss.
        judge: whether a media item, which a module after the LLM has made, is what sample `index` asks for.
        media_shapes: the raw shape of every item, per kind of media of which it is fixed and known without samples.
    """

    metas: Callable[[Sequence[int]], MetaArrays] | None = None
    check_files: Callable[[int, Collection[str] | None], Sequence[str] | None] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    end_ids: Callable[[], Collection[int]] = tuple
    notes: Callable[[], Collection[str]] = tuple
    values: Collection[str] = ()
    judge: Callable[[int, Tensor], bool] | None = None
    media_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def abilities_of(source: Source) -> SourceAbilities:
    """What a source declares; of a custom one that declares nothing, its methods and attributes of those names."""
    custom: Any = source
    if (declared := getattr(custom, "abilities", None)) is not None:
        return declared
    return SourceAbilities(
        getattr(custom, "metas", None),
        getattr(custom, "check_files", None),
        getattr(custom, "decode", None),
        lambda: getattr(custom, "end_ids", ()),
        lambda: getattr(custom, "notes", ()),
        getattr(custom, "values", ()),
        getattr(custom, "judge", None),
        getattr(custom, "media_shapes", {}),
    )


@runtime_checkable
class PromptSource(Protocol):
    """A source that can make a sample of a question that somebody asks, in the form that its own samples have."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end an answer."""

    def prompt(self, text: str, media: Sequence[tuple[str, Path]]) -> tuple[SampleMeta, Sample]:
        """A question without its answer, with media by kind and file, in order. Raises SampleError if it cannot be
        asked, or a file cannot be read."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token."""


@runtime_checkable
class QuestionSource(Source, Protocol):
    """A source of questions with one right answer each, which evaluation can show and score by kind."""

    def kind(self, index: int) -> str:
        """The kind of question that sample `index` asks."""

    def question(self, index: int) -> str:
        """The text before the answer."""

    def answer(self, index: int) -> str:
        """The right answer, without the end token."""

    def picture(self, index: int) -> str:
        """The sample's media as text art, empty without media."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids up to the first end token."""


def metas_of(
    source: Source, indices: Sequence[int], reading: AbstractContextManager[object] | None = None
) -> MetaArrays:
    """The metadata of some samples of any source as arrays: at once where it has them so, else one by one. `reading` is
    entered around each look at the source, which may be another thread's otherwise."""
    reading = reading or nullcontext()
    if (known := abilities_of(source).metas) is not None:
        with reading:
            return known(indices)
    metas: list[SampleMeta | str] = []
    for index in indices:
        with reading:
            try:
                metas.append(source.meta(index))
            except SampleError as error:
                metas.append(str(error))
    return MetaArrays.of(metas)


def check_meta(meta: SampleMeta) -> None:
    """Check that a sample's metadata makes sense by itself. Raises SampleError: there are no tokens; media items
    overlap, are out of order or outside the sequence; runs overlap, are out of order or not those of their item; items
    of a kind are placed in part; target spans are empty, overlap, are out of order, outside `1..tokens`, on placeholder
    tokens or between those of an item."""
    who = f"sample {meta.id!r}"
    if meta.tokens < 1:
        raise SampleError(f"{who}: it has {meta.tokens} tokens, need at least 1")
    end = 0
    for item in meta.media:
        if item.rows < 1:
            raise SampleError(f"{who}: the {item.name!r} at position {item.position} has {item.rows} rows, need >= 1")
        _check_runs(who, item)
        if not end <= item.position <= item.stop <= meta.tokens:
            raise SampleError(
                f"{who}: the {item.name!r} at positions {item.position}..{item.stop - 1} must lie in "
                f"{end}..{meta.tokens - 1}, after the media item before it and within the {meta.tokens} tokens"
            )
        end = item.stop
    for name in {item.name for item in meta.media if item.runs} & {item.name for item in meta.media if not item.runs}:
        raise SampleError(
            f"{who}: of its {name!r} items some have runs and some have none; a processor places them all"
        )
    end = 1  # nothing comes before token 0 from which to predict it
    for start, stop in meta.targets:
        if not end <= start < stop <= meta.tokens:
            raise SampleError(
                f"{who}: target span [{start}, {stop}) must be a non-empty part of [{end}, {meta.tokens}): token 0 "
                f"cannot be predicted, spans ascend without overlap, the sequence has {meta.tokens} tokens"
            )
        end = stop
        for item in meta.media:
            if item.position < stop and start < item.stop:
                raise SampleError(
                    f"{who}: target span [{start}, {stop}) covers the {item.name!r} at position {item.position}; "
                    f"placeholder tokens and what lies between those of an item cannot be targets"
                )


def _check_runs(who: str, item: MediaItem) -> None:
    if not item.runs:
        return
    ends = [item.position, *(position + rows for position, rows in item.runs)]
    ascend = all(rows > 0 and end <= position for end, (position, rows) in zip(ends, item.runs, strict=False))
    if not ascend or item.runs[0][0] != item.position or sum(rows for _, rows in item.runs) != item.rows:
        raise SampleError(
            f"{who}: the {item.name!r} at position {item.position} with {item.rows} rows has the runs "
            f"{list(item.runs)}; they must ascend without overlap, begin there and have as many rows together"
        )


def check_sample(
    sample: Sample, meta: SampleMeta, placeholders: Mapping[str, int], kinds: Collection[str] | None = None
) -> None:
    """Check that a payload is what its metadata says.

    Args:
        kinds: the kinds of media that were asked for; None: all. Of the others the placeholders alone are looked at.

    Raises:
        SampleError: another id; tokens not int64 `[meta.tokens]`; a kind of media without a placeholder; other media
            counts or shapes; placed items without a unit, or a unit without any; other placeholder tokens in the
            sequence than media items account for.
    """
    who = f"sample {meta.id!r}"
    if sample.id != meta.id:
        raise SampleError(f"{who}: its payload has the id {sample.id!r}")
    if sample.tokens.dtype != torch.int64 or tuple(sample.tokens.shape) != (meta.tokens,):
        raise SampleError(
            f"{who}: tokens are {sample.tokens.dtype} {list(sample.tokens.shape)}, its metadata promises torch.int64 "
            f"[{meta.tokens}]"
        )
    tokens = sample.tokens.numpy()
    for name in sorted({*sample.media, *sample.units, *(item.name for item in meta.media)}.difference(placeholders)):
        raise SampleError(
            f"{who}: media of kind {name!r} has no placeholder token; kinds with one: {sorted(placeholders)}"
        )
    for name, token in placeholders.items():
        items = [item for item in meta.media if item.name == name]
        placed = sum(bool(item.runs) for item in items)
        if bool(sample.units.get(name)) != bool(placed) and wants(kinds, name):
            raise SampleError(
                f"{who}: its payload has {len(sample.units.get(name, ()))} tensors in a unit of its {name!r}, its "
                f"metadata {placed} {name!r} that a processor has placed"
            )
        planned = [item.shape for item in items if not item.runs]
        actual = [tuple(tensor.shape) for tensor in sample.media.get(name, ())]
        if actual != planned and wants(kinds, name):
            raise SampleError(
                f"{who}: its payload has {len(actual)} {name!r} of shapes {actual}, "
                f"its metadata {len(planned)} of {planned}"
            )
        items = [item for item in meta.media if placeholders[item.name] == token]  # also of kinds that share the token
        places = np.flatnonzero(tokens == token).tolist()
        promised = [p for item in items for at, rows in item.spans for p in range(at, at + rows)]
        if len(places) != len(promised):
            raise SampleError(
                f"{who}: {len(places)} {name!r} placeholder tokens (id {token}) in its sequence, {len(promised)} rows "
                f"of {len(items)} {name!r} media items to place there"
            )
        if places != promised:
            raise SampleError(
                f"{who}: {name!r} placeholder tokens (id {token}) are at positions {places}, "
                f"its metadata says {promised}"
            )
