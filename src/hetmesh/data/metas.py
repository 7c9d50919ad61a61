"""The metadata of some samples of a source as arrays: at once where it has them so, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from hetmesh.data.source import Source
from hetmesh.errors import SampleError
from hetmesh.graph.meta_arrays import MetaArrays
from hetmesh.graph.sample import SampleMeta


@runtime_checkable
class VectorSource(Protocol):
    """A source that has the metadata of its samples as arrays."""

    def metas(self, indices: Sequence[int]) -> MetaArrays:
        """The metadata of these samples, as `meta` gives it one by one."""
        ...


def metas_of(
    source: Source, indices: Sequence[int], reading: AbstractContextManager[object] | None = None
) -> MetaArrays:
    """The metadata of some samples of any source as arrays: at once where it has them so, else one by one.

    Args:
        reading: entered around each look at the source, which may be another thread's otherwise.
    """
    if isinstance(source, VectorSource):
        with reading or nullcontext():
            return source.metas(indices)
    return metas_one_by_one(source, indices, reading)


def metas_one_by_one(
    source: Source, indices: Sequence[int], reading: AbstractContextManager[object] | None = None
) -> MetaArrays:
    """The same from `meta` of each."""
    found: list[SampleMeta | str] = []
    for index in indices:
        with reading or nullcontext():
            try:
                found.append(source.meta(index))
            except SampleError as error:
                found.append(str(error))
    return MetaArrays.of(found)
