"""Make an fp64 run an oracle: remove the casts to fp32 that transformers makes inside a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def exact_dtypes(*modules: nn.Module) -> Iterator[None]:
    """While the context lasts, run RMSNorm and rotary embedding submodules of `modules` in the dtype of their inputs.

    transformers computes both in fp32, so that an fp64 model has fp32 errors (about 1e-7, and they hide changes below
    that size). Attention must be `sdpa`, as adapters choose it: the eager one also casts. Rotary frequencies are
    recomputed in fp64 where they are the default ones; scaled ones keep their fp32 values, which are constants.

    Submodules are told by what they hold: a norm has `weight` and `variance_epsilon`, a rotary embedding `inv_freq`
    and `attention_scaling`. Sharded modules work alike. The other submodules are not touched.

    Raises:
        ValueError: a submodule called `...RMSNorm` or `...RotaryEmbedding` of another build, whose casts would stay.
    """
    with ExitStack() as stack:
        for root in modules:
            for name, module in root.named_modules():
                forward = _exact_forward(name, module)
                if forward is not None:
                    module.forward = forward  # shadows the method of the class
                    stack.callback(module.__dict__.pop, "forward", None)
        yield


def _exact_forward(name: str, module: nn.Module) -> Any:
    if hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
        return partial(_norm, module)
    if hasattr(module, "inv_freq") and hasattr(module, "attention_scaling"):
        return partial(_rotary, module)
    kind = type(module).__name__
    if kind.endswith(("RMSNorm", "RotaryEmbedding")) and not isinstance(module, nn.RMSNorm):
        raise ValueError(f"exact_dtypes: {name!r} is a {kind} of unknown build; its casts to fp32 would stay")
    return None


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return module.weight * (hidden_states * torch.rsqrt(variance + module.variance_epsilon))


@torch.no_grad()
def _rotary(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = module.inv_freq.to(torch.float64)
    if module.rope_type == "default":
        dim = 2 * frequencies.numel()
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim
        frequencies = module.config.rope_parameters["rope_theta"] ** -exponents
    angles = position_ids[..., None].to(torch.float64) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return tuple((f(angles) * module.attention_scaling).to(x.dtype) for f in (torch.cos, torch.sin))
