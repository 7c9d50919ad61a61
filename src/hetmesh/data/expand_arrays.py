"""Expansion of many samples at once: what `expand` does to one sample, done to arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hetmesh.data.check import check_meta
from hetmesh.data.expand import Expansion, ItemRows, ModuleRows, expand
from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.meta_arrays import MetaArrays, PositionIds, shape_of, size_of
from hetmesh.graph.sample import SampleMeta


@dataclass(frozen=True, eq=False)
class ExpandedArrays:
    """Expanded samples and what was cut off them.

    Attributes:
        metas: the expanded metadata.
        dropped_media: media items per sample that did not fit, int64 `[n]`.
        dropped_tokens: expanded tokens per sample that did not fit, int64 `[n]`.
    """

    metas: MetaArrays
    dropped_media: np.ndarray
    dropped_tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Expander:
    """How the modules of a run expand samples; see `expand` for the fields. Called with one sample it is `expand`.

    Raises:
        RecipeError: `seq_len` is below 1.
    """

    item_rows: ItemRows
    seq_len: int | None = None
    module_rows: ModuleRows | None = None
    position_ids: PositionIds | None = None

    def __post_init__(self) -> None:
        if self.seq_len is not None and self.seq_len < 1:
            raise RecipeError(f"[training] seq_len = {self.seq_len} must be at least 1")

    def __call__(self, meta: SampleMeta) -> Expansion:
        """One sample. Raises what `expand` raises."""
        return expand(
            meta,
            self.item_rows,
            seq_len=self.seq_len,
            module_rows=self.module_rows,
            position_ids=self.position_ids,
        )

    def refused(self, given: MetaArrays) -> np.ndarray:
        """The samples that `expand` raises an error for, ascending; int64."""
        bad = _malformed(given)
        bad[list(given.unreadable)] = True
        rows = self._item_rows(given)
        old = given.items[:, 2]
        np.logical_or.at(bad, given.sample_of_item, (rows < 1) | ((old != 1) & (old != rows)))
        if self.seq_len is not None and not bad.all():
            first = np.flatnonzero(np.diff(given.item_ends) > 0)
            at = given.item_ends[first]
            leads = (given.items[at, 1] == 0) & (rows[at] > self.seq_len)  # nothing is left of a cut sample
            bad[first[leads]] = True
        bad[[i for i, meta in enumerate(given.given) if meta.position_ids is not None]] = True
        return np.flatnonzero(bad)

    def all(self, given: MetaArrays) -> ExpandedArrays:
        """All samples at once; none of them is `refused`."""
        n, (kinds, positions, old) = len(given), given.items[:, :3].T
        rows, of = self._item_rows(given), given.sample_of_item
        before = np.concatenate([[0], np.cumsum(rows - old)])  # tokens that all items before one have added
        first = before[given.item_ends]
        positions = positions + before[:-1] - first[of]
        total = given.tokens + np.diff(first)
        ends = total if self.seq_len is None else np.minimum(total, self.seq_len)
        if self.seq_len is not None:
            cut = (positions < self.seq_len) & (positions + rows > self.seq_len)  # at most one item of a sample
            ends[of[cut]] = positions[cut]
        kept = positions < ends[of]
        items = np.column_stack([kinds, positions, rows, given.items[:, 3:]])[kept]
        counts = np.bincount(of[kept], minlength=n)
        targets, target_ends = _targets(given, before, first, ends)
        metas = MetaArrays(
            ends,
            targets,
            target_ends,
            given.kinds,
            items,
            np.concatenate([[0], np.cumsum(counts)]),
            given.names,
            given.name_ends,
            {},
            self._module_rows(given, kept),
            self.position_ids,
        )
        return ExpandedArrays(metas, np.diff(given.item_ends) - counts, total - ends)

    def _item_rows(self, given: MetaArrays) -> np.ndarray:
        """Rows of each media item; 0 where the model makes none of it."""
        return _of_shapes(given, {kind: self.item_rows.get(kind) for kind in given.kinds})

    def _module_rows(self, given: MetaArrays, kept: np.ndarray) -> dict[str, np.ndarray]:
        out = {}
        for module, (kind, count) in (self.module_rows or {}).items():
            rows = _of_shapes(given, {each: count if each == kind else None for each in given.kinds})
            total = np.concatenate([[0], np.cumsum(np.where(kept, rows, 0))])
            out[module] = np.diff(total[given.item_ends])
        return out


class AsGiven:
    """Samples that are left as they are."""

    def __call__(self, meta: SampleMeta) -> Expansion:
        """One sample."""
        return Expansion(meta)

    def refused(self, given: MetaArrays) -> np.ndarray:
        """Those that cannot be read."""
        return np.array(sorted(given.unreadable), np.int64)

    def all(self, given: MetaArrays) -> ExpandedArrays:
        """All samples."""
        return ExpandedArrays(given, np.zeros(len(given), np.int64), np.zeros(len(given), np.int64))


def _of_shapes(given: MetaArrays, counts: Mapping[str, Callable[[tuple[int, ...]], int] | None]) -> np.ndarray:
    """Per media item the count for its extent, which is asked once per extent; 0 where it is refused, or nobody counts
    its kind. int64 `[m]`."""
    which = np.concatenate([given.items[:, :1], given.items[:, 3:]], axis=1)
    key, exact = np.zeros(len(which), np.int64), 1
    for column in which.T:
        column = column - column.min(initial=0)
        base = int(column.max(initial=0)) + 1
        key, exact = key * base + column, exact * base
    if exact >= 1 << 62:  # shapes so large that their numbers do not fit into one
        key = np.unique(which, axis=0, return_inverse=True)[1].reshape(-1)
    _, places, inverse = np.unique(key, return_index=True, return_inverse=True)
    found = []
    for kind, *shape in which[places].tolist():
        count = counts[given.kinds[kind]]
        try:
            found.append(0 if count is None else count(shape_of(shape) + size_of(shape)))
        except SampleError:
            found.append(0)
    return np.array(found, np.int64)[inverse.reshape(-1)] if len(which) else np.zeros(0, np.int64)


def _malformed(given: MetaArrays) -> np.ndarray:
    """Which samples `check_meta` refuses; bool `[n]`."""
    line = int(max(given.tokens.max(initial=0), 0)) + 1
    if line * len(given) >= 1 << 62:  # numbers that the following would overflow with
        return np.array([_refuses(meta) for meta in given])
    bad = given.tokens < 1
    of = given.sample_of_item
    start, rows = given.items[:, 1], given.items[:, 2]
    stop = start + rows
    wrong = (rows < 1) | (start < _before(stop, given.item_ends, 0)) | (stop > given.tokens[of])
    np.logical_or.at(bad, of, wrong)
    first, last = given.targets.T
    of_target = np.repeat(np.arange(len(given)), np.diff(given.target_ends))
    wrong = (first < _before(last, given.target_ends, 1)) | (first >= last) | (last > given.tokens[of_target])
    np.logical_or.at(bad, of_target, wrong)
    # On what is in order so far: a span covers an item that starts before its stop and does not stop before its start.
    sound = ~bad[of_target]
    in_order = ~bad[of]
    starts, stops = (of * line + start)[in_order], (of * line + stop)[in_order]  # samples one behind the other
    at = of_target[sound] * line
    covers = np.searchsorted(starts, at + last[sound]) > np.searchsorted(stops, at + first[sound], side="right")
    bad[of_target[sound][covers]] = True
    return bad


def _refuses(meta: SampleMeta) -> bool:
    try:
        check_meta(meta)
    except SampleError:
        return True
    return False


def _before(values: np.ndarray, ends: np.ndarray, first: int) -> np.ndarray:
    """The value before each one within its sample; `first` for those at its start."""
    out = np.concatenate([[first], values[:-1]])[: len(values)]
    out[ends[:-1][np.diff(ends) > 0]] = first
    return out


def _targets(
    given: MetaArrays, before: np.ndarray, first: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The target spans after expansion, as far as they are before the `ends` of their samples, and their own ends."""
    of = np.repeat(np.arange(len(given)), np.diff(given.target_ends))
    line = int(given.tokens.max(initial=0)) + 1
    items = given.sample_of_item * line + given.items[:, 1]

    def shifted(positions: np.ndarray) -> np.ndarray:
        return positions + before[np.searchsorted(items, of * line + positions)] - first[of]

    starts = shifted(given.targets[:, 0])
    stops = np.minimum(shifted(given.targets[:, 1] - 1) + 1, ends[of])
    kept = starts < stops
    counts = np.bincount(of[kept], minlength=len(given))
    return np.column_stack([starts, stops])[kept], np.concatenate([[0], np.cumsum(counts)])


def with_substitutes(given: MetaArrays, substitutes: Mapping[int, SampleMeta]) -> MetaArrays:
    """`given` with other samples in some places."""
    return MetaArrays.of([substitutes.get(i) or given.meta(i) for i in range(len(given))])
