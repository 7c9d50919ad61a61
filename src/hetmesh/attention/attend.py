"""`attend`: the attention of an LLM of one's own, over samples that are padded, packed or shared by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hetmesh.attention.in_transformers import attention
from hetmesh.attention.packed_rows import PACKED, attention_of
from hetmesh.errors import BoundaryError


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
        key, value = (torch.repeat_interleave(each, groups, 1) if groups > 1 else each for each in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    none: Any = None
    return attention(none, query, key, value, None, scaling=scale, attention_state=state)[0].transpose(1, 2)
