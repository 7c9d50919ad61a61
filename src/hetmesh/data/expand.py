"""From a source's samples to the sequences that the modules see: one placeholder token per row, cut to `seq_len`.

`expand` works on metadata and is pure, so every rank plans the same shapes without loading anything; `expand_tokens`
then does exactly the same to a payload. Nothing is ever padded to make counts agree.

**What is cut.** A sample longer than `seq_len` keeps the longest prefix of at most `seq_len` tokens that ends outside
a media item. So a media item survives whole or is dropped whole, every surviving target still sees the whole context
it had, and no answer about a dropped image survives. A sample whose targets are all cut is legal: it has no loss. A
sample of which nothing is left, because it starts with a media item of more than `seq_len` rows, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from hetmesh.data.check import check_meta, check_sample
from hetmesh.data.source import Sample, wants
from hetmesh.errors import SampleError
from hetmesh.graph.meta_arrays import PositionIds
from hetmesh.graph.sample import MediaItem, SampleMeta

ItemRows = Mapping[str, Callable[[tuple[int, ...]], int]]
"""Kind of media -> function from an item's `extent` to the rows that reach the sequence for it."""

ModuleRows = Mapping[str, tuple[str | None, Callable[[tuple[int, ...]], int]]]
"""Per module the kind of media that it works on, and the rows that it emits for an item of an `extent`."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """An expanded sample and what was cut off it.

    Attributes:
        meta: the expanded metadata.
        dropped_media: the media items that did not fit, as the source gave them.
        dropped_tokens: expanded tokens that were cut, placeholders of the dropped media included.
    """

    meta: SampleMeta
    dropped_media: tuple[MediaItem, ...] = ()
    dropped_tokens: int = 0


def expand(
    meta: SampleMeta,
    item_rows: ItemRows,
    *,
    seq_len: int | None = None,
    module_rows: ModuleRows | None = None,
    position_ids: PositionIds | None = None,
) -> Expansion:
    """Give every media item its rows: its placeholder becomes that many; positions and target spans move along.

    An item that takes exactly its rows already (a source that expands by itself) is left as it is.

    Args:
        meta: as a source gives it.
        item_rows: for every kind of media, the rows of one item.
        seq_len: longest sequence, in expanded tokens; see above for what is cut. None cuts nothing.
        module_rows: fills `SampleMeta.rows`, with what is left after the cut.
        position_ids: fills `SampleMeta.position_ids`; it is given the expanded and cut metadata.

    Raises:
        SampleError: a kind of media that no encoder reads; an item whose placeholders are neither 1 nor its rows;
            malformed metadata; nothing fits into `seq_len`.
    """
    check_meta(meta)
    if meta.position_ids is not None:
        raise SampleError(f"sample {meta.id!r}: position_ids are set after expansion, by the model that needs them")

    items: list[MediaItem] = []
    added = 0  # tokens that the items so far have added
    for item in meta.media:
        rows = _rows(meta.id, item, item_rows)
        items.append(replace(item, position=item.position + added, rows=rows))
        added += rows - item.rows

    moves = [(old.position, new.rows - old.rows) for old, new in zip(meta.media, items, strict=True)]

    def shifted(position: int) -> int:
        """Where a source position outside media items moves to."""
        return position + sum([more for before, more in moves if before < position])

    total = end = meta.tokens + added
    if seq_len is not None and total > seq_len:
        end = min([seq_len, *(i.position for i in items if i.position < seq_len < i.position + i.rows)])
    if end == 0 < total:
        raise SampleError(
            f"sample {meta.id!r}: nothing fits into seq_len {seq_len}: its first {items[0].name!r} takes "
            f"{items[0].rows} rows; raise [training] seq_len or shrink the item"
        )
    kept = tuple([i for i in items if i.position < end])
    targets = [(shifted(start), min(shifted(stop - 1) + 1, end)) for start, stop in meta.targets]
    expanded = SampleMeta(meta.id, end, kept, tuple([(a, b) for a, b in targets if a < b]))
    if module_rows is not None:
        emitted = MappingProxyType(
            {
                module: sum([count(item.extent) for item in kept if item.name == kind])
                for module, (kind, count) in module_rows.items()
            }
        )
        expanded = SampleMeta(meta.id, end, kept, expanded.targets, emitted)
    if position_ids is not None and (positions := position_ids(expanded)) is not None:
        expanded = replace(expanded, position_ids=positions)
    return Expansion(expanded, meta.media[len(kept) :], total - end)


def _rows(sample_id: str, item: MediaItem, item_rows: ItemRows) -> int:
    if item.name not in item_rows:
        raise SampleError(
            f"sample {sample_id!r}: no module reads media of kind {item.name!r}; kinds that are read: "
            f"{sorted(item_rows)} (a boundary's `at`)"
        )
    try:
        rows = item_rows[item.name](item.extent)
    except SampleError as error:  # an adapter knows shapes, not samples
        raise SampleError(f"sample {sample_id!r}: {error}") from error
    if rows < 1:
        raise SampleError(f"sample {sample_id!r}: a {item.name!r} of shape {item.extent} makes {rows} rows, need >= 1")
    if item.rows not in (1, rows):
        raise SampleError(
            f"sample {sample_id!r}: the {item.name!r} at position {item.position} has {item.rows} placeholder tokens "
            f"and its encoder makes {rows} rows; give 1 placeholder, or {rows}"
        )
    return rows


def blank(meta: SampleMeta, placeholders: Mapping[str, int], pad_id: int, kinds: Collection[str] | None) -> Sample:
    """A payload without content of the shapes that the expanded `meta` promises: padding, and media of zeros."""
    tokens = np.full(meta.tokens, pad_id, np.int64)
    media: dict[str, list[torch.Tensor]] = {}
    for item in meta.media:
        tokens[item.position : item.position + item.rows] = placeholders[item.name]
        if wants(kinds, item.name):
            media.setdefault(item.name, []).append(torch.zeros(item.shape))
    return Sample(meta.id, torch.from_numpy(tokens), media)


def expand_tokens(
    sample: Sample,
    source_meta: SampleMeta,
    expanded: SampleMeta,
    placeholders: Mapping[str, int],
    kinds: Collection[str] | None = None,
) -> Sample:
    """Do to a payload what `expand` did to its metadata: repeat placeholders, cut, drop media that did not fit.

    Args:
        sample: as the source loads it.
        source_meta: as the source gives it.
        expanded: the result of `expand` on `source_meta`.
        placeholders: kind of media -> token id.
        kinds: the kinds of media that were asked for; None: all.

    Raises:
        SampleError: the payload does not agree with its metadata (see `check_sample`).
    """
    check_sample(sample, source_meta, placeholders, kinds)
    # numpy: on sequences this short torch's dispatch costs more than the work
    tokens = sample.tokens.numpy()
    if source_meta.media:
        repeats = np.ones(source_meta.tokens, np.int64)
        for given, item in zip(source_meta.media, expanded.media, strict=False):  # what was dropped is at the end
            if given.rows == 1:
                repeats[given.position] = item.rows
        tokens = np.repeat(tokens, repeats)
    wanted = [name for name in placeholders if wants(kinds, name)]
    media = {name: tuple(sample.media.get(name, ()))[: expanded.num_items(name)] for name in wanted}
    return replace(
        sample,
        tokens=torch.from_numpy(tokens[: expanded.tokens]),
        media={name: tensors for name, tensors in media.items() if tensors},
    )
