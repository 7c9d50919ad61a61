"""Context-parallel attention: the ranks of a group share one sequence, and each computes the rows that it keeps.

Exact, forward and backward, for any mask of `hetmesh.context` and any assignment of rows, uneven and empty ones
included. Keys and values of other ranks stream through in chunks (see plan.py), some on their way while one is
computed, and are fetched again in the backward: what a rank holds does not grow with the number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hetmesh.attention.attention_plan import AttentionPlan, TakenRows, plan_attention
from hetmesh.attention.fetch import Finish, Wires, collect, fetch, give_back
from hetmesh.attention.flex import FLEX, flex_backward, flex_forward
from hetmesh.attention.kernels import ForwardState, Kernel, Running, Terms, cpu_backward, cpu_forward, fold, unfold
from hetmesh.attention.key_blocks import KernelCalls
from hetmesh.boundary import World
from hetmesh.context import Mask
from hetmesh.context.key_tiles import CHUNKS_AHEAD, chunk_rows
from hetmesh.errors import BoundaryError, LayoutError
from hetmesh.layout import Intervals, MeshSpec
from hetmesh.layout.intervals import extent


class ContextAttention:
    """Attention over one sequence: the mask, who keeps which rows, and how to reach them. One per microbatch.

    Args:
        shares: the positions that each rank of the group keeps, in the order of its rows (`context.assign`); left out,
            this rank keeps all and nothing is sent.
        ranks: of the group, in the order of `shares`.
        name: of the traffic in the communication log, such as "llm cp attention"; keys and values are logged under it,
            their gradients under it and " gradients".
        chunk: key rows of other ranks that are computed at a time, while three times as many are on their way; by
            default a quarter of a rank's mean rows, from 256 to 2048.

    Raises:
        LayoutError: shares do not fit the ranks, or are not the sequence, once.
        BoundaryError: this rank is not in the group.
    """

    def __init__(
        self,
        mask: Mask,
        shares: Sequence[Intervals] | None = None,
        ranks: Sequence[int] = (),
        *,
        name: str = "cp attention",
        microbatch: int = 0,
        chunk: int | None = None,
    ) -> None:
        self.mask, self.name = mask, name
        self.shares = (((0, mask.length),),) if shares is None else tuple(tuple(runs) for runs in shares)
        mean = mask.length // max(len(self.shares), 1)
        self.chunk = chunk_rows(mean) if chunk is None else chunk
        self._check(ranks if shares is not None else (0,))
        self.wires: Wires | None = None
        self.coordinate = 0
        if len(self.shares) > 1:
            mesh = MeshSpec(tuple(ranks), ("cp",), (len(ranks),))
            self.wires = Wires(World.current(), mesh, name, microbatch, mask.length)
            self.coordinate = self.wires.coordinate

    def _check(self, ranks: Sequence[int]) -> None:
        spans = sorted(span for runs in self.shares for span in runs if span[0] < span[1])
        edges = [edge for span in spans for edge in span]
        whole = edges[::2] == [0, *edges[1:-1:2]] and edges[-1] == self.mask.length if edges else not self.mask.length
        if len(ranks) != len(self.shares) or not whole or self.chunk < 1:
            raise LayoutError(
                f"{self.name}: {len(self.shares)} shares must be those of as many ranks, got {list(ranks)}, and "
                f"together the {self.mask.length} positions, each once; the chunk must be positive, got {self.chunk}"
            )

    @property
    def rows(self) -> int:
        """Rows that this rank keeps."""
        return extent(self.shares[self.coordinate])

    def plan(self, window: int | None = None) -> AttentionPlan:
        """What this rank computes and fetches, in every layer with this window."""
        return plan_attention(self.mask, self.shares, self.coordinate, window, self.chunk)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """Attention of this rank's rows. Collective over the group, also without rows, as is its backward.

        Args:
            q: `[heads, rows, features]`.
            k, v: `[key heads, rows, features]`; `heads` is a multiple of `key heads`.
            window: a query at i sees a key at j only if |i - j| < window, and the mask lets it.

        Returns:
            `[heads, rows, features]`; rows that see nothing are 0.

        Raises:
            BoundaryError: the tensors do not have the rows of this rank, or heads or dtypes that do not fit.
        """
        fits = q.dim() == 3 and k.shape == v.shape and k.shape[1:] == q.shape[1:] and q.shape[1] == self.rows
        fits = fits and q.dtype == k.dtype == v.dtype
        if not fits or q.shape[0] % k.shape[0] or (window is not None and window < 1):
            given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
            raise BoundaryError(
                f"{self.name}: q [heads, {self.rows}, features] with k and v alike, heads a multiple of theirs, of one "
                f"dtype, and a positive window are expected, got {given} and {window}"
            )
        return _Attention.apply(q, k, v, self, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, window)

    def stream(
        self, plan: AttentionPlan, kv: Tensor, direction: Literal["forward", "backward"]
    ) -> Iterator[tuple[int, Tensor, KernelCalls]]:
        """The own keys (-1), then every chunk by number: its buffer and work. The next are already on their way."""

        def start(number: int) -> Finish:
            assert self.wires is not None
            return fetch(self.wires, plan.shares, plan.chunks[number][0], number, kv, direction)

        coming = deque(start(number) for number in range(min(CHUNKS_AHEAD, len(plan.chunks))))
        yield -1, kv, plan.own
        for number, (_, work) in enumerate(plan.chunks):
            buffer = coming.popleft()()
            if number + CHUNKS_AHEAD < len(plan.chunks):
                coming.append(start(number + CHUNKS_AHEAD))
            yield number, buffer, work
            del buffer

    def give_back(self, plan: AttentionPlan, number: int, gradient: Tensor) -> Finish:
        """Start to return the gradient of a chunk's buffer."""
        assert self.wires is not None
        return give_back(self.wires, plan.shares, plan.chunks[number][0], number, gradient)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, state: ContextAttention, scale: float, window: int | None
    ) -> Tensor:
        plan = state.plan(window)
        terms = Terms(plan.masks, scale, len(q) // len(k))
        kernel = Kernel(flex_forward, flex_backward) if q.device.type in FLEX else Kernel(cpu_forward, cpu_backward)
        folded, kv = fold(q, len(k)), _stacked(k, v)
        running = Running.zeros(folded)
        for _, buffer, work in state.stream(plan, kv, "forward"):
            kernel.forward(running, folded, buffer, work, terms)
            del buffer
        out = unfold(running.out.to(q.dtype), len(q))
        ctx.save_for_backward(q, k, v, out, running.logsumexp)
        ctx.state, ctx.plan, ctx.terms, ctx.kernel = state, plan, terms, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        state: ContextAttention = ctx.state
        plan: AttentionPlan = ctx.plan
        heads = len(k)
        kv = _stacked(k, v)
        seen = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        saved = ForwardState(fold(q, heads), fold(out, heads), seen, fold(gradients[0], heads))
        dq = torch.zeros_like(saved.q, dtype=logsumexp.dtype)
        dkv = torch.zeros_like(kv, dtype=logsumexp.dtype)
        returning: deque[tuple[TakenRows, Finish]] = deque()
        for number, buffer, work in state.stream(plan, kv, "backward"):
            part = dkv if number < 0 else torch.zeros_like(buffer, dtype=dkv.dtype)
            ctx.kernel.backward(saved, buffer, work, ctx.terms, dq, part)
            del buffer
            if number >= 0:
                if len(returning) == CHUNKS_AHEAD:
                    collect(dkv, *returning.popleft())
                returning.append((plan.chunks[number][0], state.give_back(plan, number, part.to(kv.dtype))))
            del part
        while returning:
            collect(dkv, *returning.popleft())
        to_k, to_v = dkv.to(kv.dtype).unbind(1)
        return unfold(dq.to(q.dtype), len(q)), to_k.transpose(0, 1), to_v.transpose(0, 1), None, None, None


def _stacked(k: Tensor, v: Tensor) -> Tensor:
    """`[rows, 2, key heads, features]`: what is sent lies together."""
    return torch.stack([k.transpose(0, 1), v.transpose(0, 1)], 1)
