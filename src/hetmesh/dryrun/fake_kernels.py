"""Kernels of the fake device, as on CUDA: what torch.autocast casts, which kernel scaled_dot_product_attention takes,
and flex_attention with the memory of its kernels and the FLOPs of the blocks that they visit.

Rules: aten/src/ATen/autocast_mode.h and aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakTensorKeyDictionary

from hetmesh._torch_compat import FakeTensor, tree_leaves, tree_map_only, without_autocast
from hetmesh.attention.key_blocks import BLOCK
from hetmesh.dryrun.fake_values import known_value

NAME = "fake_gpu"
"""The type of the device, as torch calls it."""

_KEY = "AutocastPrivateUse1"


_LOWER = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm
    addmv addr matmul einsum mm mv linalg_vecdot linalg_multi_dot linear addbmm baddbmm bmm chain_matmul
    scaled_dot_product_attention
"""
"""Operations that autocast computes in its dtype."""

_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm norm.Scalar
    cosine_similarity nll_loss nll_loss2d mse_loss cross_entropy_loss softmax.int log_softmax.int cumprod cumsum
    prod sum
"""
"""Operations that autocast computes in fp32."""

_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"
"""Operations whose arguments autocast brings to the widest dtype among them."""


CASTS = WeakTensorKeyDictionary()
"""Weights in the dtype of autocast, cast once for as long as autocast lasts; cleared when it ends."""


def _under_autocast(name: str, casts: Callable[[list[Tensor]], Callable[[Tensor], Tensor]]) -> Callable[..., Any]:
    """The kernel of operation `name` under autocast; `casts` returns a function for each of the tensors it is given."""
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast(_KEY):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            args, kwargs = tree_map_only(Tensor, casts(tensors), (args, kwargs))
            return operation(*args, **kwargs)

    return kernel


def _to_lower(_: list[Tensor]) -> Callable[[Tensor], Tensor]:
    dtype, cached = torch.get_autocast_dtype(NAME), torch.is_autocast_cache_enabled()

    def lower(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.dtype in (dtype, torch.float64) or not isinstance(x, FakeTensor):
            return x
        if not (x.is_leaf and x.requires_grad and x.dtype == torch.float32 and cached):
            return x.to(dtype)
        cast = CASTS.get(x)
        if cast is None or cast.requires_grad != torch.is_grad_enabled():
            cast = CASTS[x] = x.to(dtype)
        return cast

    return lower


def _to_fp32(_: list[Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _to_widest(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    low = torch.get_autocast_dtype(NAME)
    widest = torch.float32 if any(x.dtype == torch.float32 for x in tensors) else low
    return lambda x: x.to(widest) if x.dtype in (torch.float32, low) else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by the kernel that CUDA would choose, cuDNN's left out as in training."""
    width, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    scale = 1 / math.sqrt(width) if scale is None else scale
    aten = torch.ops.aten
    even = width == value.shape[-1] and query.ndim == 4 and all(n > 0 for n in (*query.shape, *key.shape))
    if even and half and attn_mask is None and width <= 256:
        padded = -width % 8
        q, k, v = (torch.nn.functional.pad(x, (0, padded)) if padded else x for x in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if padded else out
    same_heads = query.shape[1:2] == key.shape[1:2]
    if even and same_heads and query.dtype != torch.float64 and width % (8 if half else 4) == 0:
        bias = attn_mask
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -torch.inf)
            if over := -bias.shape[-1] % 16:  # the kernel reads aligned rows
                bias = torch.nn.functional.pad(bias, (0, over))[..., : -over or None]
            bias = bias.expand(*query.shape[:3], key.shape[-2])
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, keep, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


@cache
def register() -> tuple[torch.library.Library, ...]:
    """Enter all this into torch's dispatcher, once per process, for the fake device."""
    every, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, casts in ((_LOWER, _to_lower), (_FP32, _to_fp32), (_WIDEST, _to_widest)):
        for name in names.split():
            library.impl(name, _under_autocast(name, casts), _KEY)
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return every, library


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
    counts = [c for c in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks) if c is not None]
    blocks = sum(int(known.sum()) for known in map(known_value, counts) if known is not None)
    out, logsumexp, _ = _flex()(q, k, v, blocks * BLOCK * BLOCK)
    return out, _Aux(logsumexp)


@cache
def _flex() -> Any:
    """The autograd function of q, k, v and the pairs of a row and a key in the blocks that a kernel visits."""
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
