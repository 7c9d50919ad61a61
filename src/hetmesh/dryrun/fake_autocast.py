"""What torch.autocast does on the fake device, and which kernel scaled_dot_product_attention takes there: as on CUDA.

Rules: aten/src/ATen/autocast_mode.h and aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hetmesh._torch_compat import FakeTensor, implement, tree_map_only, without_autocast

NAME = "fake_gpu"
"""The type of the device, as torch calls it."""

_KEY = "AutocastPrivateUse1"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LOWER = _names(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm
    addmv addr matmul einsum mm mv linalg_vecdot linalg_multi_dot linear addbmm baddbmm bmm chain_matmul
    scaled_dot_product_attention
    """
)
"""Operations that autocast computes in its dtype."""

_FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm norm.Scalar
    cosine_similarity nll_loss nll_loss2d mse_loss cross_entropy_loss softmax.int log_softmax.int cumprod cumsum
    prod sum
    """
)
"""Operations that autocast computes in fp32."""

_WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack
    """
)
"""Operations whose arguments autocast brings to the widest dtype among them."""


class _Casts:
    """Weights in the dtype of autocast, cast once for as long as autocast lasts."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def lower(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in `dtype`; a weight's cast is kept."""
        if not x.is_floating_point() or x.dtype in (dtype, torch.float64) or not isinstance(x, FakeTensor):
            return x
        if not (x.is_leaf and x.requires_grad and x.dtype == torch.float32 and torch.is_autocast_cache_enabled()):
            return x.to(dtype)
        found = self._known.get(id(x))
        if found is not None and found[0]() is x and found[1].requires_grad == torch.is_grad_enabled():
            return found[1]
        cast = x.to(dtype)
        self._known[id(x)] = weakref.ref(x), cast
        return cast

    def clear(self) -> None:
        """Autocast is over."""
        self._known.clear()


CASTS = _Casts()


def _dtype() -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _under_autocast(name: str, cast: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    operation = _operation(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast(_KEY):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return operation(*args, **kwargs)

    return kernel


def _widest(name: str) -> Callable[..., Any]:
    operation = _operation(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast(_KEY):
            wide = False

            def look(x: Tensor) -> Tensor:
                nonlocal wide
                wide = wide or x.dtype == torch.float32
                return x

            tree_map_only(Tensor, look, (args, kwargs))
            low = _dtype()
            to = torch.float32 if wide else low

            def bring(x: Tensor) -> Tensor:
                return x.to(to) if x.dtype in (torch.float32, low) else x

            args, kwargs = tree_map_only(Tensor, bring, (args, kwargs))
            return operation(*args, **kwargs)

    return kernel


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


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
    for name in _LOWER:
        implement(library, name, _KEY, _under_autocast(name, lambda x: CASTS.lower(x, _dtype())))
    for name in _FP32:
        implement(library, name, _KEY, _under_autocast(name, _wide))
    for name in _WIDEST:
        implement(library, name, _KEY, _widest(name))
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        implement(library, "scaled_dot_product_attention", key, _attention)
    return every, library
