"""From a source's samples to the sequences that the modules see: one placeholder token per row, cut to `seq_len`.

`Expander` expands the metadata of many samples at once. It is pure, so every rank plans the same shapes without loading
anything. `expand_tokens` then does exactly the same to a payload. Nothing is ever padded to make counts agree.

A placed item (`MediaItem.runs`) has its rows already, and keeps them: no count is asked for.

**What is cut.** A sample longer than `seq_len` keeps the longest prefix of at most `seq_len` tokens that ends outside
a media item. So a media item survives whole or is dropped whole, with the text between its runs, every surviving target
still sees the whole context it had, and no answer about a dropped image survives. A sample whose targets are all cut is
legal: it has no loss. A sample of which nothing is left, because it starts with a media item of more than `seq_len`
tokens, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch

from hetmesh.data.source import Sample, check_meta, check_sample, units_left, wants
from hetmesh.errors import SampleError
from hetmesh.graph.meta_arrays import UNKNOWN, MetaArrays, PositionIds, gathered, shape_of, size_of
from hetmesh.graph.sample import UNIT_ITEMS, UNIT_ROWS, MediaItem, SampleMeta, kinds_of

RowCount = Callable[[tuple[int, ...]], int]
"""From a media item's `extent` to a number of rows."""

ItemRows = Mapping[str, RowCount]
"""Kind of media -> the rows that reach the sequence for an item."""

ModuleRows = Mapping[str, tuple[str | None, RowCount]]
"""Per module the kind of media that it reads, and the rows that it emits for an item."""


@dataclass(frozen=True, eq=False)
class ExpandedArrays:
    """Many expanded samples; of each, how many media items and expanded tokens were cut, int64 `[n]`."""

    metas: MetaArrays
    dropped_media: np.ndarray
    dropped_tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Expander:
    """Gives every media item its rows: its placeholder becomes that many; positions and target spans move along. An
    item that takes exactly its rows already (a source that expands by itself) and a placed one are left as they are.

    Attributes:
        seq_len: longest sequence, in expanded tokens; see above for what is cut. None cuts nothing.
        module_rows: fills `SampleMeta.rows`, with what is left after the cut.
        position_ids: fills `SampleMeta.position_ids`; it is given the expanded and cut metadata.
        placed_rows: rows that a module emits per row of a placed item, where that is not 1.
    """

    item_rows: ItemRows
    seq_len: int | None = None
    module_rows: ModuleRows | None = None
    position_ids: PositionIds | None = None
    placed_rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def check(self, meta: SampleMeta) -> None:
        """Check that a sample can be expanded. Raises SampleError: a kind of media that no encoder reads; an item whose
        placeholders are neither 1 nor its rows; malformed metadata; nothing fits into `seq_len`."""
        check_meta(meta)
        if meta.position_ids is not None:
            raise SampleError(f"sample {meta.id!r}: position_ids are set after expansion, by the model that needs them")
        rows = [self._checked_rows(meta.id, item) for item in meta.media]
        if self.seq_len is not None and rows and meta.media[0].position == 0:
            first = meta.media[0]
            if (tokens := first.stop if first.runs else rows[0]) > self.seq_len:
                raise SampleError(
                    f"sample {meta.id!r}: nothing fits into seq_len {self.seq_len}: its first {first.name!r} takes "
                    f"{tokens} tokens; raise [training] seq_len or shrink the item"
                )

    def _checked_rows(self, sample_id: str, item: MediaItem) -> int:
        if item.name not in self.item_rows:
            raise SampleError(
                f"sample {sample_id!r}: no module reads media of kind {item.name!r}; kinds that are read: "
                f"{sorted(self.item_rows)} (`at` of a boundary; with [model] hf_path also `media` of a module, such as "
                '"image+video")'
            )
        if item.runs:
            return item.rows
        try:
            rows = self.item_rows[item.name](item.extent)
        except SampleError as error:  # an adapter knows shapes, not samples
            raise SampleError(f"sample {sample_id!r}: {error}") from error
        if rows < 1:
            raise SampleError(
                f"sample {sample_id!r}: a {item.name!r} of shape {item.extent} makes {rows} rows, need >= 1"
            )
        if item.rows not in (1, rows):
            raise SampleError(
                f"sample {sample_id!r}: the {item.name!r} at position {item.position} has {item.rows} placeholder "
                f"tokens and its encoder makes {rows} rows; give 1 placeholder, or {rows}"
            )
        return rows

    def refusals(self, metas: MetaArrays) -> dict[int, SampleError]:
        """Errors of the samples that `check` refuses, by rising place. Only suspects are looked at one by one."""
        suspects = _perhaps_malformed(metas)
        suspects[list(metas.unreadable)] = True
        suspects[[i for i, meta in enumerate(metas.given) if meta.position_ids is not None]] = True
        rows, placeholders = _counted(metas, self.item_rows), metas.items[:, 2]
        np.logical_or.at(suspects, metas.sample_of_item, (rows < 1) | ((placeholders != 1) & (placeholders != rows)))
        if self.seq_len is not None:
            tokens = np.where(metas.placed, metas.stops, rows)
            np.logical_or.at(suspects, metas.sample_of_item, (metas.items[:, 1] == 0) & (tokens > self.seq_len))
        errors = {}
        for i in np.flatnonzero(suspects).tolist():
            try:
                self.check(metas.meta(i))
            except SampleError as error:
                errors[i] = error
        return errors

    def all(self, metas: MetaArrays) -> ExpandedArrays:
        """Expand samples of which `check` refuses none."""
        n, (kinds, positions, placeholders) = len(metas), metas.items[:, :3].T
        rows, sample = _counted(metas, self.item_rows), metas.sample_of_item
        added = np.concatenate([[0], np.cumsum(rows - placeholders)])  # tokens that the items before each one add
        first = added[metas.item_ends]
        moved = added[:-1] - first[sample]
        stops = moved + np.where(metas.placed, metas.stops, positions + rows)
        positions = positions + moved
        lengths = metas.tokens + np.diff(first)
        ends = lengths if self.seq_len is None else np.minimum(lengths, self.seq_len)
        if self.seq_len is not None:
            split = (positions < self.seq_len) & (stops > self.seq_len)  # at most one item of a sample
            ends[sample[split]] = positions[split]
        fits = positions < ends[sample]
        counts = np.bincount(sample[fits], minlength=n)
        targets, target_ends = _expanded_targets(metas, added, first, ends)
        chosen, run_ends = gathered(metas.run_ends, np.flatnonzero(fits))
        runs = metas.runs[chosen]
        runs[:, 0] += np.repeat(moved[fits], np.diff(run_ends))
        expanded = replace(
            metas,
            tokens=ends,
            targets=targets,
            target_ends=target_ends,
            items=np.column_stack([kinds, positions, rows, metas.items[:, 3:]])[fits],
            item_ends=np.concatenate([[0], np.cumsum(counts)]),
            runs=runs,
            run_ends=run_ends,
            unreadable={},
            rows=self._module_rows(metas, fits),
            position_ids=self.position_ids,
            given=(),
        )
        return ExpandedArrays(expanded, np.diff(metas.item_ends) - counts, lengths - ends)

    def _module_rows(self, metas: MetaArrays, fits: np.ndarray) -> dict[str, np.ndarray]:
        rows, sample = {}, metas.sample_of_item
        for module, (media, count) in (self.module_rows or {}).items():
            counts = _counted(metas, dict.fromkeys(kinds_of(media or ""), count), self.placed_rows.get(module, 1))
            rows[module] = metas.sum_of_items(np.where(fits, counts, 0))
            left = metas.placed & (counts > 0) & (rows[module] > 0)[sample]  # of which the unit stays whole
            cut = metas.sum_of_items(left & ~fits) > 0
            if cut.any():
                rows[module + UNIT_ROWS] = np.where(cut, metas.sum_of_items(np.where(left, counts, 0)), UNKNOWN)
                rows[module + UNIT_ITEMS] = np.where(cut, metas.sum_of_items(left), UNKNOWN)
        return rows


def _counted(metas: MetaArrays, counts: ItemRows, ratio: int = 1) -> np.ndarray:
    """Rows made of each media item, int64 `[m]`: `ratio` per row of a placed one, else the count of its kind for its
    extent; 0 where it is refused, or its kind has no count."""
    known = np.array([kind in counts for kind in metas.kinds], bool)
    rows = np.where(known[metas.items[:, 0]], ratio * metas.items[:, 2], 0)
    rows[~metas.placed] = _counts_of_extents(metas.items[~metas.placed], [counts.get(kind) for kind in metas.kinds])
    return rows


def _counts_of_extents(items: np.ndarray, counts: Sequence[RowCount | None]) -> np.ndarray:
    """Per row of `MetaArrays.items` the count of its kind, which is asked for once per extent."""
    extents = np.concatenate([items[:, :1], items[:, 3:]], axis=1)
    key, size = np.zeros(len(extents), np.int64), 1
    for column in extents.T:
        column = column - column.min(initial=0)
        base = int(column.max(initial=0)) + 1
        key, size = key * base + column, size * base
    if size >= 1 << 62:  # shapes so large that their numbers do not fit into one
        key = np.unique(extents, axis=0, return_inverse=True)[1].reshape(-1)
    _, places, inverse = np.unique(key, return_index=True, return_inverse=True)
    rows = []
    for kind, *shape in extents[places].tolist():
        count = counts[kind]
        try:
            rows.append(0 if count is None else count(shape_of(shape) + size_of(shape)))
        except SampleError:
            rows.append(0)
    return np.array(rows, np.int64)[inverse.reshape(-1)] if len(extents) else np.zeros(0, np.int64)


def _perhaps_malformed(metas: MetaArrays) -> np.ndarray:
    """Which samples `check_meta` may refuse, all that it refuses among them; bool `[n]`."""
    width = int(max(metas.tokens.max(initial=0), 0)) + 1
    everything = np.ones(len(metas), bool)
    if width * len(metas) >= 1 << 62:  # positions would overflow below
        return everything
    bad = metas.tokens < 1
    sample = metas.sample_of_item
    start, rows, stop = metas.items[:, 1], metas.items[:, 2], metas.stops
    wrong = (rows < 1) | (start < _previous(stop, metas.item_ends, 0)) | (stop > metas.tokens[sample])
    np.logical_or.at(bad, sample, wrong)
    if metas.placed.any():
        np.logical_or.at(bad, sample, _wrongly_placed(metas))
    first, last = metas.targets.T
    target_sample = np.repeat(np.arange(len(metas)), np.diff(metas.target_ends))
    outside = (first >= last) | (last > metas.tokens[target_sample])
    np.logical_or.at(bad, target_sample, outside | (first < _previous(last, metas.target_ends, 1)))
    if bad.any():  # the search below needs positions in order
        return everything
    # Samples laid end to end: a span covers an item that starts before its end and does not stop before its start.
    starts, stops, at = sample * width + start, sample * width + stop, target_sample * width
    covers = np.searchsorted(starts, at + last) > np.searchsorted(stops, at + first, side="right")
    bad[target_sample[covers]] = True
    return bad


def _wrongly_placed(metas: MetaArrays) -> np.ndarray:
    """Which items have runs that are no part of an item that begins and has rows as they do, or of a kind of which some
    items of the sample are placed and some are not; bool `[m]`."""
    starts, rows = metas.runs.T
    total = np.concatenate([[0], np.cumsum(rows)])
    of_runs = total[metas.run_ends[1:]] - total[metas.run_ends[:-1]]
    wrong = metas.placed & (of_runs != metas.items[:, 2])
    item = np.repeat(np.arange(len(wrong)), np.diff(metas.run_ends))
    before = _previous(starts + rows, metas.run_ends, 0)
    np.logical_or.at(wrong, item, (rows < 1) | (starts < before))
    wrong[metas.placed] |= starts[metas.run_ends[:-1][metas.placed]] != metas.items[metas.placed, 1]
    kind = metas.sample_of_item * len(metas.kinds) + metas.items[:, 0]
    _, kind = np.unique(kind, return_inverse=True)
    placed, all_of_kind = np.bincount(kind, metas.placed), np.bincount(kind)
    return wrong | ((placed > 0) & (placed < all_of_kind))[kind]


def _previous(values: np.ndarray, ends: np.ndarray, first: int) -> np.ndarray:
    """The value before each one within its sample; `first` for those at its start."""
    out = np.concatenate([[first], values[:-1]])[: len(values)]
    out[ends[:-1][np.diff(ends) > 0]] = first
    return out


def _expanded_targets(
    metas: MetaArrays, added: np.ndarray, first: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The target spans after expansion, as far as they lie before the `ends` of their samples, and their own ends."""
    sample = np.repeat(np.arange(len(metas)), np.diff(metas.target_ends))
    width = int(metas.tokens.max(initial=0)) + 1
    items = metas.sample_of_item * width + metas.items[:, 1]

    def moved(positions: np.ndarray) -> np.ndarray:
        return positions + added[np.searchsorted(items, sample * width + positions)] - first[sample]

    starts = moved(metas.targets[:, 0])
    stops = np.minimum(moved(metas.targets[:, 1] - 1) + 1, ends[sample])
    fits = starts < stops
    counts = np.bincount(sample[fits], minlength=len(metas))
    return np.column_stack([starts, stops])[fits], np.concatenate([[0], np.cumsum(counts)])


def expand_tokens(
    sample: Sample,
    source_meta: SampleMeta,
    expanded: SampleMeta,
    placeholders: Mapping[str, int],
    kinds: Collection[str] | None = None,
) -> Sample:
    """Do to a payload what an `Expander` did to its metadata: repeat placeholders, cut, drop media that did not fit. A
    unit stays whole while an item of it is left (see `Sample.unit_rows`).

    Args:
        source_meta: as the source gives it; `expanded` was made of it.
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
        for item, cut in zip(source_meta.media, expanded.media, strict=False):  # what was dropped is at the end
            if item.rows == 1:
                repeats[item.position] = cut.rows
        tokens = np.repeat(tokens, repeats)
    media = {name: tuple(sample.media.get(name, ()))[: expanded.num_items(name)] for name in placeholders}
    return replace(
        units_left(sample, source_meta, expanded, kinds),
        tokens=torch.from_numpy(tokens[: expanded.tokens]),
        media={name: tensors for name, tensors in media.items() if tensors and wants(kinds, name)},
    )
