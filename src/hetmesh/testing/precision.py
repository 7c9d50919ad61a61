"""Make an fp64 run an oracle: remove the casts to fp32 that transformers makes inside a forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

_KEPT: ContextVar[bool] = ContextVar("casts to fp32 are kept", default=False)


@contextmanager
def kept_casts() -> Iterator[None]:
    """In the body, `exact_dtypes` changes no cast of this thread: for what prepares samples, which a run does before
    its first step or during a step."""
    token = _KEPT.set(True)
    try:
        yield
    finally:
        _KEPT.reset(token)


@contextmanager
def exact_dtypes(*modules: nn.Module, every_cast: bool = False) -> Iterator[None]:
    """In the body, run RMSNorm, rotary embedding and router submodules of `modules` in the dtype of their inputs.

    transformers computes both in fp32, so that an fp64 model has fp32 errors (about 1e-7, and they hide changes below
    that size). Attention must be `sdpa`, as adapters choose it: the eager one also casts. Rotary frequencies are
    recomputed in fp64 where they are the default ones; scaled ones keep their fp32 values, which are constants.

    Submodules are known by what they hold: a norm has `weight` and `variance_epsilon`, a rotary embedding `inv_freq`
    and `attention_scaling`, a router `weight` and `norm_topk_prob`. Rotary positions of a vision tower's attention are
    applied by a function of its file, which is replaced too. Sharded modules work alike. Others are not touched.

    Args:
        every_cast: instead of that, for modules of any build: every cast to fp32 becomes one to fp64 (slower; does
            nothing to modules in fp32).

    Raises:
        ValueError: a submodule called `...RMSNorm` or `...RotaryEmbedding` of another build, whose casts would stay.
    """
    with ExitStack() as stack:
        if every_cast:
            if any(p.dtype == torch.float64 for root in modules for p in root.parameters()):
                stack.enter_context(_no_singles())
            yield
            return
        for root in modules:
            for name, module in root.named_modules():
                forward = _exact_forward(name, module)
                if forward is not None:
                    module.forward = forward  # shadows the method of the class
                    stack.callback(module.__dict__.pop, "forward", None)
                stack.enter_context(_exact_function(module, "apply_rotary_pos_emb_vision", _rotate))
        yield


def _exact_function(module: nn.Module, name: str, replacement: Any) -> AbstractContextManager[object]:
    """While it lasts, `name` in the file that defines the class of `module` is `replacement`, where there is one."""
    file = sys.modules[type(module).__module__]
    return patch.object(file, name, replacement) if hasattr(file, name) else nullcontext()


def _exact_forward(name: str, module: nn.Module) -> Any:
    kind = type(module).__name__
    if hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
        return partial(_norm, module)
    # Of Qwen3-VL-MoE's, which always normalises, only the class says what it computes.
    if hasattr(module, "weight") and (hasattr(module, "norm_topk_prob") or kind == "Qwen3VLMoeTextTopKRouter"):
        return partial(_router, module)
    if hasattr(module, "inv_freq") and hasattr(module, "attention_scaling"):
        return partial(_rotary, module)
    if kind.endswith(("RMSNorm", "RotaryEmbedding")) and not isinstance(module, nn.RMSNorm):
        raise ValueError(f"exact_dtypes: {name!r} is a {kind} of unknown build; its casts to fp32 would stay")
    return None


@contextmanager
def _no_singles() -> Iterator[None]:
    """While it lasts, casts to fp32 are casts to fp64, also where a backward computes again. (Buffers in fp32 stay
    constants, but what is computed of them is fp64.)"""
    zeros, single = torch.zeros, torch.Tensor.float

    def doubled(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # In `zeros` of no shape a fused optimizer counts its steps, also in checkpoints.
            if _KEPT.get() or (function is zeros and args == ((),)):
                return function(*args, **kwargs)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            return function(*(torch.float64 if argument is torch.float32 else argument for argument in args), **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(
            patch.object(
                torch.Tensor, "float", lambda x, **how: (single if _KEPT.get() else torch.Tensor.double)(x, **how)
            )
        )
        for owner, name in (
            (torch.Tensor, "to"),
            (torch.Tensor, "type"),
            (torch.Tensor, "softmax"),
            (torch.Tensor, "new_zeros"),
            (torch, "zeros"),
            (torch, "zeros_like"),
            (nn.functional, "softmax"),
            (torch, "softmax"),
        ):
            stack.enter_context(patch.object(owner, name, doubled(getattr(owner, name))))
        yield


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return module.weight * (hidden_states * torch.rsqrt(variance + module.variance_epsilon))


def _router(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), module.weight)
    weights, experts = torch.topk(torch.softmax(logits, dim=-1), module.top_k, dim=-1)
    normalised = getattr(module, "norm_topk_prob", True)
    return logits, weights / weights.sum(-1, keepdim=True) if normalised else weights, experts


@torch.no_grad()
def _rotary(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = module.inv_freq.to(torch.float64)
    if module.rope_type in ("default", "axial"):
        dim = 2 * frequencies.numel()
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim
        frequencies = module.config.rope_parameters["rope_theta"] ** -exponents
    angles = position_ids[..., None].to(torch.float64) * frequencies
    joined = getattr(module, "recomposition_frequencies", lambda angles: torch.cat((angles, angles), dim=-1))
    return tuple((joined(f(angles)) * module.attention_scaling).to(x.dtype) for f in (torch.cos, torch.sin))


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb_vision` without its casts."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-2)

    return turned(q), turned(k)
