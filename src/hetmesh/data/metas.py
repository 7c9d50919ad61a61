"""MetaArrays: the metadata of many samples as arrays, so that a million of them cost no Python object each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hetmesh.errors import SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta

if TYPE_CHECKING:
    from hetmesh.data.source import Source


@dataclass(frozen=True, eq=False)
class MetaArrays:
    """The metadata of n samples, as a source gives it: k target spans and m media items in all. Not for changing.

    Attributes:
        tokens: int64 `[n]`.
        targets: int64 `[k, 2]`: `[start, stop)`; `target_ends`, int64 `[n + 1]`: those of sample i are
            `target_ends[i]..target_ends[i + 1] - 1`.
        kinds: the kinds of media.
        items: int64 `[m, 3 + dims]`: kind (an index into `kinds`), position, rows, and the shape, where dims that an
            item does not have are 0; `item_ends`, int64 `[n + 1]`, as `target_ends`.
        names: uint8, the ids of the samples in UTF-8 one behind the other; `name_ends`, int64 `[n + 1]`.
        unreadable: why the metadata of some samples cannot be read, by their index here.
    """

    tokens: np.ndarray
    targets: np.ndarray
    target_ends: np.ndarray
    kinds: tuple[str, ...]
    items: np.ndarray
    item_ends: np.ndarray
    names: np.ndarray
    name_ends: np.ndarray
    unreadable: Mapping[int, str]

    @staticmethod
    def of(metas: Sequence[SampleMeta | str]) -> MetaArrays:
        """From metadata of single samples (not expanded); a text in place of one says why it cannot be read."""
        known = [SampleMeta("", 1) if isinstance(meta, str) else meta for meta in metas]
        kinds = tuple(sorted({item.name for meta in known for item in meta.media}))
        dims = max((len(item.shape) for meta in known for item in meta.media), default=0)
        items = [
            (kinds.index(item.name), item.position, item.rows, *item.shape, *[0] * (dims - len(item.shape)))
            for meta in known
            for item in meta.media
        ]
        names = [meta.id.encode() for meta in known]
        return MetaArrays(
            np.array([meta.tokens for meta in known], np.int64),
            np.array([span for meta in known for span in meta.targets], np.int64).reshape(-1, 2),
            _ends([len(meta.targets) for meta in known]),
            kinds,
            np.array(items, np.int64).reshape(len(items), 3 + dims),
            _ends([len(meta.media) for meta in known]),
            np.frombuffer(b"".join(names), np.uint8),
            _ends(list(map(len, names))),
            {i: meta for i, meta in enumerate(metas) if isinstance(meta, str)},
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> np.ndarray:
        """Tokens that carry loss, int64 `[n]`."""
        total = np.concatenate([[0], np.cumsum(self.targets[:, 1] - self.targets[:, 0])])
        return total[self.target_ends[1:]] - total[self.target_ends[:-1]]

    def counts(self, kind: str) -> np.ndarray:
        """Media items of that kind per sample, int64 `[n]`."""
        number = self.kinds.index(kind) if kind in self.kinds else -1
        total = np.concatenate([[0], np.cumsum(self.items[:, 0] == number)])
        return total[self.item_ends[1:]] - total[self.item_ends[:-1]]

    def take(self, indices: Sequence[int] | np.ndarray) -> MetaArrays:
        """Those of some samples, in that order."""
        chosen = np.asarray(indices, np.int64)
        spans, target_ends = _gathered(self.target_ends, chosen)
        items, item_ends = _gathered(self.item_ends, chosen)
        names, name_ends = _gathered(self.name_ends, chosen)
        bad = self.unreadable
        return MetaArrays(
            self.tokens[chosen],
            self.targets[spans],
            target_ends,
            self.kinds,
            self.items[items],
            item_ends,
            self.names[names],
            name_ends,
            {at: bad[i] for at, i in enumerate(chosen.tolist()) if i in bad} if bad else {},
        )

    def meta(self, index: int) -> SampleMeta:
        """That of one sample.

        Raises:
            SampleError: it cannot be read.
        """
        if index in self.unreadable:
            raise SampleError(self.unreadable[index])
        first, stop = self.item_ends[index : index + 2].tolist()
        media = tuple(
            MediaItem(self.kinds[kind], tuple(n for n in shape if n), position, rows)
            for kind, position, rows, *shape in self.items[first:stop].tolist()
        )
        a, b = self.target_ends[index : index + 2].tolist()
        start, end = self.name_ends[index : index + 2].tolist()
        targets = tuple((i, j) for i, j in self.targets[a:b].tolist())
        return SampleMeta(self.names[start:end].tobytes().decode(), int(self.tokens[index]), media, targets)


@runtime_checkable
class VectorSource(Protocol):
    """A source that has the metadata of its samples as arrays."""

    def metas(self, indices: Sequence[int]) -> MetaArrays:
        """The metadata of these samples, as `meta` gives it one by one."""
        ...


def metas_of(source: Source, indices: Sequence[int]) -> MetaArrays:
    """The metadata of some samples of any source as arrays: at once where it has them so, else one by one."""
    return source.metas(indices) if isinstance(source, VectorSource) else metas_one_by_one(source, indices)


def metas_one_by_one(source: Source, indices: Sequence[int]) -> MetaArrays:
    """The same from `meta` of each."""
    found: list[SampleMeta | str] = []
    for index in indices:
        try:
            found.append(source.meta(index))
        except SampleError as error:
            found.append(str(error))
    return MetaArrays.of(found)


def _ends(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


def _gathered(ends: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the parts of the chosen samples lie, and where they end once they are gathered."""
    counts = ends[chosen + 1] - ends[chosen]
    new = _ends(counts)
    return np.repeat(ends[chosen] - new[:-1], counts) + np.arange(new[-1]), new
