"""One sample expanded, as a batch of one."""

from __future__ import annotations

from typing import NamedTuple

from hetmesh.data import Expander
from hetmesh.graph.meta_arrays import MetaArrays
from hetmesh.graph.sample import MediaItem, SampleMeta


class Expansion(NamedTuple):
    """An expanded sample, the media items that did not fit, and how many expanded tokens were cut."""

    meta: SampleMeta
    dropped_media: tuple[MediaItem, ...] = ()
    dropped_tokens: int = 0


def expand(expander: Expander, meta: SampleMeta) -> Expansion:
    """Expand one sample. Raises SampleError: see `Expander.check`."""
    expander.check(meta)
    expanded = expander.all(MetaArrays.of([meta]))
    (cut,) = expanded.metas
    return Expansion(cut, meta.media[len(cut.media) :], int(expanded.dropped_tokens[0]))
