"""flex_attention, as context parallelism calls it, against dense attention in float64: values and gradients.

One rank of a group of three is played in one process: its own rows, and the buffers of keys that others would send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gpu_checks.found import Found, Place
from hetmesh.attention.attention_plan import AttentionPlan, plan_attention
from hetmesh.attention.flex import flex_backward, flex_forward
from hetmesh.attention.kernels import ForwardState, Kernel, Running, Terms, cpu_backward, cpu_forward, fold
from hetmesh.attention.key_blocks import KernelCalls
from hetmesh.context import Mask, assign, causal, text_with_instances
from hetmesh.layout import Intervals
from support.dense_oracle import dense

LENGTH = 520
MASKS = {"text with images": text_with_instances(LENGTH, [(30, 200), (260, 420)]), "causal": causal(LENGTH)}
WINDOWS = (None, 50)
FLOAT32 = 1e-5
"""Largest difference over the largest value; an H100 stays below it (torch 2.11)."""
OVER_DENSE = 3.0
"""In bfloat16: over the error of dense attention in bfloat16, which rounds as often."""
FLEX = Kernel(flex_forward, flex_backward)
CPU = Kernel(cpu_forward, cpu_backward)


@dataclass(frozen=True)
class Heads:
    """A head configuration: query heads, key heads and columns."""

    query: int
    key: int
    width: int


HEADS = (Heads(8, 2, 64), Heads(4, 4, 128), Heads(4, 2, 12))


@dataclass(frozen=True)
class Piece:
    """Keys and values at some positions, and what is computed on them."""

    positions: Tensor
    work: KernelCalls


def run(place: Place) -> Found:
    """The largest errors of outputs and gradients."""
    place.need_kernels("values of attention")
    device = torch.device("cuda" if place.on_gpu else "cpu")
    kernels = {"flex": (FLEX, place.on_gpu)}
    if not place.on_gpu:
        kernels["the CPU's kernel"] = (CPU, True)
    float32, over_dense = 0.0, 0.0
    for which, (kernel, backward) in kernels.items():
        for heads in HEADS:
            for mask in MASKS.values():
                for window in WINDOWS:
                    case = Case(heads, mask, window, device, backward)
                    float32 = max(float32, case.error(kernel, torch.float32))
                    rounded, dense_too = (case.error(each, torch.bfloat16) for each in (kernel, None))
                    over_dense = max(over_dense, rounded / dense_too)
            print(f"{which}, {heads}: so far {float32:.1e}, in bfloat16 {over_dense:.2f} of dense", flush=True)
    left_out = {} if place.on_gpu else {"compiled kernels, flex's gradients": "flex_attention has them on CUDA alone"}
    figures = {"float32_error": float32, "bfloat16_over_dense": over_dense}
    return Found(figures, {"float32_error": FLOAT32, "bfloat16_over_dense": OVER_DENSE}, left_out)


@dataclass(frozen=True)
class Case:
    """One attention, in any dtype."""

    heads: Heads
    mask: Mask
    window: int | None
    device: torch.device
    backward: bool

    def error(self, kernel: Kernel | None, dtype: torch.dtype) -> float:
        """The largest difference from float64, over the largest value, of outputs and, if `backward`, of gradients.

        Args:
            kernel: None: dense attention in `dtype`.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> Tensor:
            size = (count, self.mask.length, self.heads.width)
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        q, k, v, gradient = (draw(n) for n in (self.heads.query, self.heads.key, self.heads.key, self.heads.query))
        rows = pieces_of(self.mask, self.window)[1]
        right = self._dense([x.double() for x in (q, k, v)], gradient.double(), rows)
        on_device = [x.to(self.device) for x in (q, k, v)]
        if kernel is None:
            given = self._dense(on_device, gradient.to(self.device), rows.to(self.device))
        else:
            given = self._pieces(kernel, on_device, gradient.to(self.device))
        pairs = list(zip(given, right, strict=True))[: None if self.backward else 1]
        return max(float((a.cpu().double() - b).abs().max() / b.abs().max()) for a, b in pairs)

    @property
    def scale(self) -> float:
        """Of scores."""
        return 1 / math.sqrt(self.heads.width)

    def _dense(self, inputs: list[Tensor], gradient: Tensor, rows: Tensor) -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        out = dense_attention(q, k, v, visible(self.mask, self.window).to(q.device), self.scale)[:, rows]
        to_q, to_k, to_v = torch.autograd.grad(out, (q, k, v), gradient[:, rows])
        key_heads = self.heads.key
        return [fold(out.detach(), key_heads), fold(to_q[:, rows], key_heads), torch.stack((to_k, to_v))]

    def _pieces(self, kernel: Kernel, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
        """As `ContextAttention` does it."""
        plan, rows, pieces = pieces_of(self.mask, self.window)
        q, k, v = inputs
        terms = Terms(plan.masks, self.scale, self.heads.query // self.heads.key)
        folded, to_out = (fold(x[:, rows.to(self.device)], self.heads.key) for x in (q, gradient))
        places = [piece.positions.to(self.device) for piece in pieces]
        buffers = [torch.stack((k, v))[:, :, at].permute(2, 0, 1, 3).contiguous() for at in places]
        running = Running.zeros(folded)
        with torch.no_grad():
            for piece, kv in zip(pieces, buffers, strict=True):
                kernel.forward(running, folded, kv, piece.work, terms)
        dq, dkv = torch.zeros_like(running.out), torch.zeros(2, *k.shape, device=self.device)
        if self.backward:
            seen = running.logsumexp.masked_fill(running.logsumexp == -torch.inf, torch.inf)
            saved = ForwardState(folded, running.out.to(q.dtype), seen, to_out)
            for piece, kv, at in zip(pieces, buffers, places, strict=True):
                part = torch.zeros_like(kv, dtype=dq.dtype)
                kernel.backward(saved, kv, piece.work, terms, dq, part)
                dkv[:, :, at] += part.permute(1, 2, 0, 3)
        return [running.out, dq, dkv]


def pieces_of(mask: Mask, window: int | None) -> tuple[AttentionPlan, Tensor, list[Piece]]:
    """The plan of the second of three ranks, its rows, and each buffer of keys."""
    shares = assign(mask, 3)
    plan = plan_attention(mask, shares, 1, window, 4096)
    rows = positions(shares[1])
    pieces = [Piece(positions(taken.taken.intervals[1]), work) for taken, work in plan.chunks]
    return plan, rows, [Piece(rows, plan.own), *pieces]


def positions(runs: Intervals) -> Tensor:
    """One by one."""
    return torch.cat([torch.arange(a, b) for a, b in runs]) if runs else torch.empty(0, dtype=torch.int64)


@lru_cache(maxsize=8)
def visible(mask: Mask, window: int | None) -> Tensor:
    """The whole mask, bool `[length, length]`, entry by entry."""
    places = torch.arange(mask.length)
    near = (places[:, None] - places[None, :]).abs() < (window or mask.length + 1)
    return torch.from_numpy(dense(mask)) & near


def dense_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Softmax of all scores, `[heads, length, columns]`; rows that see nothing are 0."""
    group = len(q) // len(k)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~sees, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v
