"""PackedRows: a batch whose samples lie in one row, which ranks may share, and the attention over that row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.in_transformers import attention
from hetmesh.errors import BoundaryError

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


def attend(
    query: Tensor, key: Tensor, value: Tensor, batch: Mapping[str, Any], *, scale: float | None = None
) -> Tensor:
    """Causal attention over each sample, or what the recipe's `attention_mask` says. Nothing is dropped.

    Args:
        query: `[B, heads, S, features]`, with rotary positions applied, if any.
        key, value: `[B, key heads, S, features]`; `heads` is a multiple of `key heads`.
        batch: what the module was called with. Packed samples come with their mask, and with which rank keeps what.
        scale: 1 / sqrt(features) by default.

    Returns:
        `[B, heads, S, features]`.

    Raises:
        BoundaryError: tensors that do not fit each other or the batch, or a copy of a packed batch.
    """
    if query.ndim != 4 or key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise BoundaryError(
            "attend: query [B, heads, S, features] with key and value alike and heads a multiple of theirs are "
            f"expected, got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    state = attention_of(batch)
    if state is None:
        if PACKED in batch:
            raise BoundaryError(
                "attend: packed samples need the batch that the module was called with, not a copy of it"
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (torch.repeat_interleave(x, groups, 1) if groups > 1 else x for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    none: Any = None
    return attention(none, query, key, value, None, scaling=scale, attention_state=state)[0].transpose(1, 2)
