"""What adapters share whose modules map rows to as many rows: projectors and users' modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import SampleLike


class RowWise:
    """Base of the adapters of row-wise modules."""

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
