"""MetaArrays: the metadata of many samples as arrays, so that a million of them cost no Python object each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import overload

import numpy as np

from hetmesh.errors import SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.layout.hashing import memoized

PositionIds = Callable[[SampleMeta], tuple[tuple[int, ...], ...] | None]
"""From an expanded sample to its `SampleMeta.position_ids`."""

UNKNOWN = -1
"""In `MetaArrays.rows`: the metadata of that sample was not expanded for that module."""

NO_DIM, SIZE = -1, -2
"""In the columns of a shape: no dim; from here on it is the size."""


@dataclass(frozen=True, eq=False)
class MetaArrays(Sequence[SampleMeta]):
    """The metadata of n samples: k target spans and m media items in all. A sequence of `SampleMeta`, each of which is
    made when it is asked for. Not for changing.

    Attributes:
        tokens: int64 `[n]`.
        targets: int64 `[k, 2]`: `[start, stop)`; `target_ends`, int64 `[n + 1]`: those of sample i are
            `target_ends[i]..target_ends[i + 1] - 1`.
        kinds: the kinds of media.
        items: int64 `[m, 3 + dims]`: kind (an index into `kinds`), position, rows, and the shape, where dims that an
            item lacks are `NO_DIM`, and a size follows `SIZE`; `item_ends`, int64 `[n + 1]`, as `target_ends`.
        runs: int64 `[r, 2]`: position and rows of each run of the placed items (`MediaItem.runs`); `run_ends`, int64
            `[m + 1]`: those of item i are `run_ends[i]..run_ends[i + 1] - 1`, none if it is not placed.
        names: uint8, the ids of the samples in UTF-8, one after another; `name_ends`, int64 `[n + 1]`.
        unreadable: why the metadata of some samples cannot be read, by their index here.
        rows: of expanded samples: rows that each module emits for them, int64 `[n]` by module; `UNKNOWN` where a
            sample does not say.
        position_ids: what makes `SampleMeta.position_ids`, where the model has such.
        given: the samples themselves, where these arrays were made from them.
    """

    tokens: np.ndarray
    targets: np.ndarray
    target_ends: np.ndarray
    kinds: tuple[str, ...]
    items: np.ndarray
    item_ends: np.ndarray
    runs: np.ndarray
    run_ends: np.ndarray
    names: np.ndarray
    name_ends: np.ndarray
    unreadable: Mapping[int, str]
    rows: Mapping[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    position_ids: PositionIds | None = None
    given: Sequence[SampleMeta] = ()

    @staticmethod
    def of(metas: Sequence[SampleMeta | str]) -> MetaArrays:
        """From metadata of single samples; a text in place of one says why it cannot be read."""
        if isinstance(metas, MetaArrays):
            return metas
        known = [SampleMeta("", 1) if isinstance(meta, str) else meta for meta in metas]
        media = [item for meta in known for item in meta.media]
        kinds = tuple(sorted({item.name for item in media}))
        shapes = [(*item.shape, SIZE, *item.size) if item.size else item.shape for item in media]
        dims = max(map(len, shapes), default=0)
        items = [
            (kinds.index(item.name), item.position, item.rows, *shape, *[NO_DIM] * (dims - len(shape)))
            for item, shape in zip(media, shapes, strict=True)
        ]
        names = [meta.id.encode() for meta in known]
        modules = sorted({name for meta in known for name in meta.rows})
        return MetaArrays(
            np.array([meta.tokens for meta in known], np.int64),
            np.array([span for meta in known for span in meta.targets], np.int64).reshape(-1, 2),
            _ends([len(meta.targets) for meta in known]),
            kinds,
            np.array(items, np.int64).reshape(len(items), 3 + dims),
            _ends([len(meta.media) for meta in known]),
            np.array([run for item in media for run in item.runs], np.int64).reshape(-1, 2),
            _ends([len(item.runs) for item in media]),
            np.frombuffer(b"".join(names), np.uint8),
            _ends(list(map(len, names))),
            {i: meta for i, meta in enumerate(metas) if isinstance(meta, str)},
            {name: np.array([meta.rows.get(name, UNKNOWN) for meta in known], np.int64) for name in modules},
            given=tuple(known),
        )

    def check(self) -> None:
        """Raise ValueError unless arrays that were read from a file belong together, of samples without rows."""
        n, dims = len(self), 0 if self.items.ndim != 2 else self.items.shape[1]
        shapes = {"tokens": (n,), "targets": (len(self.targets), 2), "items": (len(self.items), max(dims, 3))}
        shapes["runs"] = (len(self.runs), 2)
        for name, shape in shapes.items():
            if (array := getattr(self, name)).dtype != np.int64 or array.shape != shape:
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, must be int64 {list(shape)}")
        if self.names.dtype != np.uint8 or self.names.ndim != 1:
            raise ValueError("names must be bytes")
        for name, what in (("target_ends", self.targets), ("item_ends", self.items), ("name_ends", self.names)):
            check_ends(name, getattr(self, name), n, len(what))
        check_ends("run_ends", self.run_ends, len(self.items), len(self.runs))
        kinds, sizes = self.items[:, 0], self.items[:, 1:]
        if len(kinds) and not (kinds.min() >= 0 and kinds.max() < len(self.kinds) and sizes.min() >= SIZE):
            raise ValueError("items are of kinds that there are not, or of negative sizes")
        if (self.tokens < 1).any() or any(not 0 <= i < n for i in self.unreadable):
            raise ValueError("samples without tokens, or unreadable ones that there are not")
        _ = [self.ids[i] for i in range(n)] if (self.names > 127).any() else None  # is it UTF-8

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> SampleMeta: ...
    @overload
    def __getitem__(self, index: slice) -> MetaArrays: ...
    def __getitem__(self, index: int | slice) -> SampleMeta | MetaArrays:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.meta(at)

    @cached_property
    def sample_of_item(self) -> np.ndarray:
        """Per media item the sample that it is of, int64 `[m]`."""
        return np.repeat(np.arange(len(self)), np.diff(self.item_ends))

    @cached_property
    def placed(self) -> np.ndarray:
        """Which media items are placed (`MediaItem.runs`), bool `[m]`."""
        return np.diff(self.run_ends) > 0

    @cached_property
    def stops(self) -> np.ndarray:
        """The position after the last placeholder token of each media item, int64 `[m]`."""
        stops = self.items[:, 1] + self.items[:, 2]
        stops[self.placed] = self.runs[self.run_ends[1:][self.placed] - 1].sum(1)
        return stops

    def sum_of_items(self, values: np.ndarray) -> np.ndarray:
        """Per sample the sum of `values` `[m]` of its media items; int64 `[n]`."""
        total = np.concatenate([[0], np.cumsum(values)])
        return total[self.item_ends[1:]] - total[self.item_ends[:-1]]

    @cached_property
    def num_targets(self) -> np.ndarray:
        """Tokens that carry loss, int64 `[n]`."""
        total = np.concatenate([[0], np.cumsum(self.targets[:, 1] - self.targets[:, 0])])
        return total[self.target_ends[1:]] - total[self.target_ends[:-1]]

    def rows_of(self, module: str) -> np.ndarray:
        """Rows that a module emits, int64 `[n]`; 0 for samples that do not say."""
        rows = self.rows.get(module)
        return np.zeros(len(self), np.int64) if rows is None else np.maximum(rows, 0)

    @property
    def ids(self) -> Sequence[str]:
        return _Ids(self)

    def counts(self, kind: str) -> np.ndarray:
        """Media items of that kind per sample, int64 `[n]`."""
        number = self.kinds.index(kind) if kind in self.kinds else -1
        return self.sum_of_items(self.items[:, 0] == number)

    def take(self, indices: Sequence[int] | np.ndarray) -> MetaArrays:
        """Those of some samples, in that order."""
        chosen = np.asarray(indices, np.int64)
        spans, target_ends = gathered(self.target_ends, chosen)
        items, item_ends = gathered(self.item_ends, chosen)
        runs, run_ends = gathered(self.run_ends, items)
        names, name_ends = gathered(self.name_ends, chosen)
        bad = self.unreadable
        unreadable = {at: bad[i] for at, i in enumerate(chosen.tolist()) if i in bad} if bad else {}
        rows = {name: counts[chosen] for name, counts in self.rows.items()}
        given = [self.given[i] for i in chosen.tolist()] if self.given else ()
        columns = self.tokens[chosen], self.targets[spans], target_ends, self.kinds, self.items[items], item_ends
        parts = self.runs[runs], run_ends, self.names[names], name_ends
        return MetaArrays(*columns, *parts, unreadable, rows, self.position_ids, given)

    def meta(self, index: int) -> SampleMeta:
        """That of one sample. Raises SampleError: it cannot be read."""
        if index in self.unreadable:
            raise SampleError(self.unreadable[index])
        if self.given:
            return self.given[index]
        return self._make(index)

    @memoized
    def _make(self, index: int) -> SampleMeta:
        first, stop = self.item_ends[index : index + 2].tolist()
        ends = itertools.pairwise(self.run_ends[first : stop + 1].tolist())
        runs = [tuple((at, rows) for at, rows in self.runs[a:b].tolist()) for a, b in ends]
        media = tuple(
            MediaItem(self.kinds[kind], shape_of(columns), position, rows, size_of(columns), own)
            for (kind, position, rows, *columns), own in zip(self.items[first:stop].tolist(), runs, strict=True)
        )
        a, b = self.target_ends[index : index + 2].tolist()
        targets = tuple((i, j) for i, j in self.targets[a:b].tolist())
        rows = {name: int(counts[index]) for name, counts in self.rows.items() if counts[index] != UNKNOWN}
        meta = SampleMeta(self.ids[index], int(self.tokens[index]), media, targets, MappingProxyType(rows))
        if self.position_ids is not None and (positions := self.position_ids(meta)) is not None:
            meta = replace(meta, position_ids=positions)
        return meta


class _Ids(Sequence[str]):
    """The ids of samples, each decoded when it is asked for."""

    def __init__(self, metas: MetaArrays) -> None:
        self._metas = metas

    def __len__(self) -> int:
        return len(self._metas)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self._metas.name_ends[index : index + 2].tolist()
        return self._metas.names[start:end].tobytes().decode()


def shape_of(columns: Sequence[int]) -> tuple[int, ...]:
    """The shape in the columns of a media item."""
    end = columns.index(SIZE) if SIZE in columns else len(columns)
    return tuple(n for n in columns[:end] if n != NO_DIM)


def size_of(columns: Sequence[int]) -> tuple[int, ...]:
    """The size in the columns of a media item."""
    start = columns.index(SIZE) + 1 if SIZE in columns else len(columns)
    return tuple(n for n in columns[start:] if n != NO_DIM)


def check_ends(name: str, ends: np.ndarray, count: int, total: int) -> None:
    """Raise ValueError unless `ends` are of `count` parts, one after another, of `total` elements."""
    right = ends.dtype == np.int64 and ends.shape == (count + 1,) and ends[0] == 0 and ends[-1] == total
    if not right or (np.diff(ends) < 0).any():
        raise ValueError(f"{name} must ascend from 0 to {total} in {count} steps")


def _ends(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def gathered(ends: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the chosen parts lie, and where they end once they are gathered."""
    counts = ends[chosen + 1] - ends[chosen]
    new = _ends(counts)
    return np.repeat(ends[chosen] - new[:-1], counts) + np.arange(new[-1]), new
