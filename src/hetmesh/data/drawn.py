"""The samples of a global batch before their payloads are loaded, and what `training.seq_len` cuts off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from hetmesh.data.expand import ExpandedArrays
from hetmesh.graph import MetaArrays, SampleMeta

_NAMED_SAMPLES = 3  # in a message


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """One sample of a global batch, before its payload is loaded.

    Attributes:
        index: its index in the source.
        given: its metadata as the source gives it; `meta`: expanded.
        unreadable: why not even its metadata can be read; a sample of one padding token stands for it. Else empty.
    """

    index: int
    given: SampleMeta
    meta: SampleMeta
    unreadable: str = ""


class DrawnBatch(Sequence[DrawnSample]):
    """Samples of a global batch, as arrays; a `DrawnSample` is made when it is asked for, whose attributes these are
    too: `given` and the expanded `metas`, `unreadable` by place in the batch. `dropped_media`, `dropped_tokens`: items
    and expanded tokens that did not fit into `seq_len`, int64 `[n]`."""

    def __init__(
        self, indices: tuple[int, ...], given: MetaArrays, expanded: ExpandedArrays, unreadable: Mapping[int, str]
    ) -> None:
        self.indices, self.given, self.unreadable = indices, given, unreadable
        self.metas = expanded.metas
        self.dropped_media, self.dropped_tokens = expanded.dropped_media, expanded.dropped_tokens

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> DrawnSample: ...
    @overload
    def __getitem__(self, index: slice) -> DrawnBatch: ...
    def __getitem__(self, index: int | slice) -> DrawnSample | DrawnBatch:
        if isinstance(index, slice):
            return self._part(range(len(self))[index])
        meta = self.metas[index]
        i = index + len(self) if index < 0 else index
        return DrawnSample(self.indices[i], self.given[i], meta, self.unreadable.get(i, ""))

    def _part(self, places: range) -> DrawnBatch:
        expanded = ExpandedArrays(self.metas.take(places), self.dropped_media[places], self.dropped_tokens[places])
        unreadable = {at: self.unreadable[i] for at, i in enumerate(places) if i in self.unreadable}
        return DrawnBatch(tuple(self.indices[i] for i in places), self.given.take(places), expanded, unreadable)

    def names(self, places: Sequence[int]) -> str:
        """The ids of the samples at `places` for a message, the first few of many."""
        named = ", ".join(repr(self.given.ids[i]) for i in places[:_NAMED_SAMPLES])
        more = f" and {len(places) - _NAMED_SAMPLES} more" if len(places) > _NAMED_SAMPLES else ""
        return f"{'sample' if len(places) == 1 else 'samples'} {named}{more}"


def describe_without_targets(drawn: DrawnBatch, places: Sequence[int], seq_len: int) -> str:
    """The samples at `places`, of which no loss counts anything, by their ids, and why."""
    at = list(places)
    cut = int((drawn.given.num_targets[at] > 0).sum())
    lost = int((drawn.dropped_media[at] > 0).sum())
    cuts = " and ".join(f"the {what} of {n}" for what, n in (("targets", cut), ("media", lost)) if n)
    why = f" (training.seq_len = {seq_len} cuts {cuts})" if cuts else " (the data source gives them none)"
    return drawn.names(places) + why


def describe_cut(drawn: DrawnBatch, seq_len: int) -> str:
    """Which samples are cut and still have targets, by their ids, and what they lose; empty if none is. Such a sample
    trains on an answer without its end. (Those that lose all targets: `describe_without_targets`.)"""
    shortened = (drawn.dropped_tokens > 0) | (drawn.dropped_media > 0)
    places = np.flatnonzero(shortened & (drawn.metas.num_targets > 0)).tolist()
    if not places:
        return ""
    answers = int((drawn.given.num_targets[places] > drawn.metas.num_targets[places]).sum())
    media = int(drawn.dropped_media[places].sum())
    lost = f"{int(drawn.dropped_tokens[places].sum())} tokens" + (f" and {media} media items" if media else "")
    return (
        f"training.seq_len = {seq_len} cuts {len(places)} of {len(drawn)} samples by {lost}: {drawn.names(places)}; "
        f"{answers} lose the end of an answer"
    )
