"""The gated delta rule and a causal convolution over samples that lie in one row.

Yang et al., "Gated Delta Networks" (arXiv 2412.06464). Per head the state S `[dk, dv]` follows
S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T. Within a chunk of tokens this is a triangular system and
matrix products (arXiv 2406.06484); chunks are cut anew at each sequence, so no state passes from one to another and
none is padded to the length of another. (To forget the state by a large negative gate instead loses fp32: the gate
cancels in the cumulative sums of its chunk.) Sums are kept in fp32 or better, also under autocast. On a GPU the kernels
of fla and causal_conv1d do the same, where they are installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from hetmesh.attention.flex import on_device
from hetmesh.context.mask_sources import ragged

KERNEL_DEVICES = {"cuda"}
"""Types of devices on which the kernels of installed packages run."""

CHUNK = 64
"""Tokens that are solved together."""


def delta_rule(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    bounds: Sequence[int] | np.ndarray,
    *,
    initial_state: Tensor | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over sequences that lie one after another.

    Args:
        q, k: `[rows, key heads, dk]`; each serves a run of value heads. Without q only the states are computed.
        v: `[rows, heads, dv]`.
        g: `[rows, heads]`, logarithms of decays.
        beta: `[rows, heads]`.
        bounds: `[n + 1]`: where the sequences begin, ascending, and all rows.
        initial_state: `[n, heads, dk, dv]`; zeros by default.
        normalize: q and k to length 1 first.

    Returns:
        `[rows, heads, dv]` of v's dtype (without q none), and last states, `[n, heads, dk, dv]` in fp32 or better.
    """
    bounds = np.asarray(bounds, np.int64)
    kernel = _kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", k)
    if kernel is not None:
        out, state = kernel(
            *(x[None] for x in (k if q is None else q, k, v)),
            g=g[None],
            beta=beta[None],
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalize,
            cu_seqlens=on_device(bounds, k.device),
        )
        return out[0], state
    dtype, groups = torch.promote_types(v.dtype, torch.float32), v.shape[1] // k.shape[1]
    with torch.autocast(v.device.type, enabled=False):
        *found, sizes = _chunks(bounds)
        index, back, order, place = (on_device(x, v.device) for x in found)
        v_, g, beta, *keys = (
            _by_chunk(x.to(dtype), index) for x in (v, g[..., None], beta[..., None], k, q) if x is not None
        )
        if normalize:
            keys = [x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in keys]
        if groups > 1:
            keys = [x.repeat_interleave(groups, 1) for x in keys]
        k, queries = keys[0], [x * x.shape[-1] ** -0.5 for x in keys[1:]]
        decay = g.cumsum(2)  # [chunks, heads, C, 1]
        above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
        # Masked before exp: above the diagonal it would overflow.
        pairs = (decay - decay.mT).masked_fill(above, -torch.inf).exp()
        scaled, last = k * beta, decay[:, :, -1:]
        right = torch.cat([v_ * beta, scaled * decay.exp()], -1)
        solved = torch.linalg.solve_triangular((scaled @ k.mT) * pairs, right, upper=False, unitriangular=True)
        new, seen = solved.split([v_.shape[-1], k.shape[-1]], -1)
        parts = [new, seen, (k * (last - decay).exp()).mT, last.exp()]
        parts += [part for x in queries for part in ((x @ k.mT) * pairs, x * decay.exp())]
        if initial_state is None:
            initial_state = v_.new_zeros(len(order), v_.shape[1], k.shape[-1], v_.shape[-1])
        out, state = _scan(parts, sizes, initial_state.to(dtype)[order])
        rows = out.transpose(1, 2).flatten(0, 1)[back] if queries else v[:0]
        return rows.to(v.dtype), state[place]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """A causal convolution of each feature of `x`, `[rows, features]`, by itself, with zeros in front.

    Args:
        weight: `[features, kernel]`; the last is that of the token itself.
        activation: what follows: "silu", "swish" (the same) or None. Raises ValueError for others.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation behind a convolution: valid are silu, swish and None, got {activation!r}")
    kernel = _kernel("causal_conv1d", "causal_conv1d_fn", x)
    over = x.T[None].contiguous()
    if kernel is not None:
        return kernel(over, weight, bias, activation=activation)[0].T
    reach = weight.shape[1] - 1
    out = conv1d(over.to(weight.dtype), weight[:, None], bias, padding=reach, groups=len(weight))
    out = out[0, :, : len(x)].T
    return (silu(out) if activation is not None else out).to(x.dtype)


@cache
def _function(package: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(package), name, None)
    except ImportError:
        return None


def _kernel(package: str, name: str, x: Tensor) -> Callable[..., Any] | None:
    return _function(package, name) if x.device.type in KERNEL_DEVICES and x.dtype is not torch.float64 else None


def _scan(parts: Sequence[Tensor], sizes: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Go through the chunks step by step; in each, those of all sequences that are long enough."""
    outs: list[Tensor] = []
    ended: list[Tensor] = []
    for new, seen, k, kept, *asked in zip(*(part.split(sizes) for part in parts), strict=True):
        if len(new) < len(state):
            ended.append(state[len(new) :])
            state = state[: len(new)]
        value = new - seen @ state
        if asked:
            outs.append(asked[1] @ state + asked[0] @ value)
        state = kept * state + k @ value
    return torch.cat(outs or [state]), torch.cat([state, *reversed(ended)])


def _by_chunk(x: Tensor, index: Tensor) -> Tensor:
    """`[rows, heads, d]` -> `[chunks, heads, C, d]`; zeros where a chunk has no rows."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded[index].view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)


def _chunks(bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Chunks by their place in their sequence, then by sequence, the longest first.

    Returns the row of each token of each chunk, the number of rows where it has none; of each row its token; the
    sequences in their order; the place of each in that; how many chunks each step has.
    """
    lengths = np.diff(bounds)
    counts = -(-lengths // CHUNK)
    order = np.argsort(-counts, kind="stable")
    counts = counts[order]
    sequence, step = ragged(np.zeros_like(counts), counts)
    place = np.lexsort((sequence, step))
    sequence, step = sequence[place], step[place]
    row = bounds[:-1][order][sequence][:, None] + step[:, None] * CHUNK + np.arange(CHUNK)
    row = np.where(row < bounds[1:][order][sequence][:, None], row, bounds[-1]).reshape(-1)
    back = np.empty(bounds[-1] + 1, np.int64)
    back[row] = np.arange(len(row))
    return row, back[:-1], order, np.argsort(order), np.bincount(step).tolist()
