"""What kernels of context-parallel attention work on: folded heads, the softmax so far, what the backward needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetmesh.attention.key_blocks import PartialMasks


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """`[heads, rows, features]` -> `[kv_heads, rows * group, features]`, contiguous."""
    heads, rows, width = x.shape
    return x.reshape(kv_heads, heads // kv_heads, rows, width).transpose(1, 2).reshape(kv_heads, -1, width).contiguous()


def unfold(x: Tensor, heads: int) -> Tensor:
    """The inverse of `fold`: `[heads, rows, features]`, the heads of a row beside each other in memory."""
    kv_heads, folded, width = x.shape
    group = heads // kv_heads
    rows = x.view(kv_heads, folded // group, group, width).permute(1, 0, 2, 3)
    return rows.reshape(folded // group, heads, width).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Running:
    """Attention over the keys so far.

    Attributes:
        out: `[key heads, rows x group, features]`.
        logsumexp: `[key heads, rows x group]`, -inf for rows that have seen nothing.
    """

    out: Tensor
    logsumexp: Tensor

    @classmethod
    def zeros(cls, q: Tensor) -> Running:
        """No keys yet, for folded queries; sums are kept in fp32 or better."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return cls(torch.zeros_like(q, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype))

    def add(self, rows: slice, out: Tensor, logsumexp: Tensor) -> None:
        """Join the attention of some rows over further keys."""
        mine, before = self.out[:, rows], self.logsumexp[:, rows]
        after = torch.logaddexp(before, logsumexp)
        base = after.masked_fill(after == -torch.inf, 0.0)  # weights of rows that see nothing are 0, not nan
        mine.mul_((before - base).exp_()[..., None])
        mine.addcmul_(out.to(mine.dtype), (logsumexp.to(mine.dtype) - base).exp_()[..., None])
        before.copy_(after)


@dataclass(frozen=True, eq=False)
class Terms:
    """What all calls of one attention share.

    Attributes:
        scale: of the products of queries and keys.
        group: query heads per key head.
    """

    masks: PartialMasks
    scale: float
    group: int


@dataclass(frozen=True, eq=False)
class Saved:
    """What the backward knows of the forward, folded.

    Attributes:
        logsumexp: +inf for rows that see nothing: their probabilities are 0.
        gradient: of `out`.
    """

    q: Tensor
    out: Tensor
    logsumexp: Tensor
    gradient: Tensor
