"""PackedRows: a batch whose samples lie in one row, which ranks may share, and the attention over that row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetmesh.attention.context_attention import ContextAttention

PACKED = "target_index"
"""A key of every packed batch of tokens, and of no padded one."""


@dataclass(frozen=True, eq=False)
class PackedRows(Mapping[str, Any]):
    """What an adapter or a user's module is called with; as a mapping it is `tensors`.

    Attributes:
        tensors: the batch, cut to the tokens that this rank keeps.
        attention: which of the row's tokens see each other, who keeps which, and how to reach them.
    """

    tensors: Mapping[str, Any]
    attention: ContextAttention

    def __getitem__(self, key: str) -> Any:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def attention_of(batch: Mapping[str, Any]) -> ContextAttention | None:
    """The attention of packed rows; None for a padded batch."""
    return batch.attention if isinstance(batch, PackedRows) else None


def with_tensors(batch: Mapping[str, Any], tensors: dict[str, Any]) -> Mapping[str, Any]:
    """A batch of other tensors; the attention of packed rows stays."""
    return PackedRows(tensors, batch.attention) if isinstance(batch, PackedRows) else tensors
