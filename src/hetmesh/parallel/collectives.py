"""The three collectives of tensor parallelism, with autograd, on local tensors.

They are written out, not left to DTensor dispatch, which costs several times the arithmetic of a small layer (about
0.3 ms per linear and direction on a CPU). Tensors of no elements are not sent: every rank of the group sees the same
shapes, so every rank skips alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh._torch_compat import not_compiled


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # autograd may hand it to others as well
        if total.numel():
            dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(partial)
        if partial.numel():
            dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.start, ctx.width = sum(widths[:rank]), widths[rank]
        padded = x.new_zeros(*x.shape[:-1], widths[0])  # the first shard is the widest: torch.chunk's rule
        padded[..., : x.shape[-1]] = x
        gathered = x.new_empty(len(widths), *padded.shape)
        if padded.numel():
            dist.all_gather(list(gathered.unbind()), padded, group=group)
        return torch.cat([shard[..., :width] for shard, width in zip(gathered, widths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].narrow(-1, ctx.start, ctx.width).contiguous(), None, None


@not_compiled
def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, the same on every rank, on its way into sharded computation: its gradient is summed over the group."""
    return _Enter.apply(x, group)


@not_compiled
def leave(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group of each rank's `partial`, in place; the gradient, the same on every rank, passes through.

    `partial` must be contiguous and not needed by the backward of what made it (a linear's output is neither).
    """
    return _Leave.apply(partial, group)


@not_compiled
def gather(x: Tensor, widths: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """The shards of all ranks side by side in the last dim; `widths[i]` is the last size of rank i's, as `torch.chunk`
    makes them. The gradient, the same on every rank, is cut to the own shard."""
    return _Gather.apply(x, widths, group)
