"""flex_attention on the fake device: memory as that of its kernels on CUDA, FLOPs of the blocks that they visit."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.flop_counter import register_flop_formula

from hetmesh.attention.key_blocks import BLOCK
from hetmesh.dryrun.fake_values import known_value


class _Aux(NamedTuple):
    lse: Tensor


def flex_attention_without_values(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None = None, **_: Any
) -> tuple[Tensor, _Aux]:
    """What flex_attention returns, of the same shapes.

    Args:
        q: `[1, heads, rows, features]`.
        k, v: `[1, key heads, keys, features]`.
    """
    out, logsumexp, _passed = _operations()(q, k, v, _pairs(block_mask))
    return out, _Aux(logsumexp)


def _pairs(mask: BlockMask) -> int:
    """Pairs of a row and a key in the blocks that a kernel visits."""
    blocks = 0
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        known = None if counts is None else known_value(counts)
        blocks += 0 if known is None else int(known.sum())
    return blocks * BLOCK * BLOCK


@cache
def _operations() -> Any:
    library = torch.library.Library("hetmesh", "DEF")
    library.define("flex(Tensor q, Tensor k, Tensor v, int pairs) -> (Tensor, Tensor, int)")
    library.define(
        "flex_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int pairs)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    )

    def forward(q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor, int]:
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), pairs

    def backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: int
    ) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)  # and delta

    for name, kernel in (("flex", forward), ("flex_backward", backward)):
        torch.library.register_fake(f"hetmesh::{name}", kernel, lib=library)
    ops: Any = torch.ops.hetmesh

    @register_flop_formula(ops.flex)
    def flops(q_shape: Any, k_shape: Any, v_shape: Any, pairs: int, *_: Any, **__: Any) -> int:
        return 4 * pairs * int(q_shape[1]) * int(q_shape[-1])

    @register_flop_formula(ops.flex_backward)
    def backward_flops(_gradient: Any, q_shape: Any, *rest: Any, **__: Any) -> int:
        return 10 * int(rest[-1]) * int(q_shape[1]) * int(q_shape[-1])

    class Flex(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pairs: int) -> tuple[Tensor, Tensor, int]:
            out, lse, _ = ops.flex(q, k, v, pairs)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.pairs = pairs
            return out, lse, pairs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            to_q, to_k, to_v, _ = ops.flex_backward(gradients[0], q, k, v, out, lse, ctx.pairs)
            return to_q, to_k, to_v, None

    Flex.library = library  # type: ignore[attr-defined]
    return Flex.apply
