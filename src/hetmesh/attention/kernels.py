"""What a kernel is: attention of local rows on one buffer of keys; and the one for CPUs, by torch's flash attention.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867); the backward recomputes
probabilities from the final logsumexp, as in FlashAttention-2 (arXiv 2307.08691, section 3.1), so it can take the keys
in pieces too. Tensors are *folded*: the query heads that share a key head lie beside each other as rows,
`[key heads, rows x group, features]`, so that grouped-query attention needs no copies of keys and its sums over query
heads are part of a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hetmesh._torch_compat import cpu_flash_attention, cpu_flash_attention_backward
from hetmesh.attention.key_blocks import Call, KernelCalls, PartialMasks
from hetmesh.layout import Intervals


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
class ForwardState:
    """What the backward knows of the forward, folded.

    Attributes:
        logsumexp: +inf for rows that see nothing: their probabilities are 0.
        gradient: of `out`.
    """

    q: Tensor
    out: Tensor
    logsumexp: Tensor
    gradient: Tensor


def cpu_forward(running: Running, q: Tensor, kv: Tensor, work: KernelCalls, terms: Terms) -> None:
    """Add the keys and values of a buffer `[keys, 2, key heads, features]` to `running`."""
    taken = _Taken(kv)
    for call in work.calls:
        rows = slice(call.rows[0] * terms.group, call.rows[1] * terms.group)
        k, v = taken.of(call)
        bias, blind = _bias(call, terms, q)
        out, logsumexp = cpu_flash_attention(q[None, :, rows], k, v, 0.0, False, attn_mask=bias, scale=terms.scale)
        if blind is not None:  # the kernel leaves some number for rows that see none of the keys
            logsumexp = logsumexp.masked_fill(blind, -torch.inf)
        running.add(rows, out[0], logsumexp[0])


def cpu_backward(saved: ForwardState, kv: Tensor, work: KernelCalls, terms: Terms, dq: Tensor, dkv: Tensor) -> None:
    """Add the gradients of the queries and of the buffer to `dq` and `dkv`, which have their shapes."""
    taken = _Taken(kv)
    for call in work.calls:
        rows = slice(call.rows[0] * terms.group, call.rows[1] * terms.group)
        k, v = taken.of(call)
        bias, _ = _bias(call, terms, saved.q)
        q, out, logsumexp, gradient = (x[None, :, rows] for x in (saved.q, saved.out, saved.logsumexp, saved.gradient))
        to_q, to_k, to_v = cpu_flash_attention_backward(
            gradient, q, k, v, out, logsumexp, 0.0, False, attn_mask=bias, scale=terms.scale
        )
        dq[:, rows] += to_q[0]
        at = 0
        for a, b in call.keys:
            dkv[a:b, 0] += to_k[0, :, at : at + b - a].transpose(0, 1)
            dkv[a:b, 1] += to_v[0, :, at : at + b - a].transpose(0, 1)
            at += b - a


class _Taken:
    """Keys and values of calls, `[1, key heads, keys, features]` each; copied where they are not one range, once for
    calls in a row that take the same."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self._keys: Intervals | None = None
        self._rows = kv

    def of(self, call: Call) -> tuple[Tensor, Tensor]:
        if call.keys != self._keys:
            parts = [self.kv[a:b] for a, b in call.keys]
            self._keys, self._rows = call.keys, parts[0] if len(parts) == 1 else torch.cat(parts)
        k, v = self._rows.unbind(1)
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _bias(call: Call, terms: Terms, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """0 where a folded row sees a key and -inf elsewhere; and, if there are any, which rows see none of the keys."""
    if call.positions is None:
        return None, None
    seen = terms.masks.of(call).repeat_interleave(terms.group, 0)
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    return bias, ~seen.any(1)


class Kernel(NamedTuple):
    """Local attention on one kind of device."""

    forward: Callable[[Running, Tensor, Tensor, KernelCalls, Terms], None]
    backward: Callable[[ForwardState, Tensor, KernelCalls, Terms, Tensor, Tensor], None]
