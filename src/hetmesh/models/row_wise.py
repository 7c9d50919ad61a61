"""What modules share that work on each row by itself, projectors and users' own: rows in, as many rows out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import SampleLike


class RowWise:
    """The part of an adapter that says so."""

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {}  # uneven shards of hidden features are fine

    def item_rows(self, shape: tuple[int, ...]) -> int:
        raise NotImplementedError("a projector reads rows, not media")

    def rows(self, incoming: int) -> int:
        return incoming

    def collate(
        self,
        samples: Sequence[SampleLike],
        metas: Sequence[SampleMeta],
        *,
        placeholders: Mapping[str, int] = MappingProxyType({}),
        pad_id: int = 0,
    ) -> dict[str, Tensor]:
        return {}
