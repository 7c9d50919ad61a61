"""Grouped matrix products: rows that lie expert by expert, each group times the weight of its expert."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetmesh._torch_compat import grouped_mm


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Each group of rows through the linear layer of its expert.

    Args:
        rows: `[sum(counts), inputs]`, expert by expert.
        weight: `[experts, outputs, inputs]`, of the dtype of `rows`.
        counts: rows of each expert; any may be 0. An expert without rows gets a zero gradient, not none.

    Returns:
        `[rows, outputs]`.
    """
    return _GroupedLinear.apply(rows, weight, tuple(counts))


class _GroupedLinear(torch.autograd.Function):
    """One node of the graph for all experts, so that what is computed again by activation checkpointing keeps the same
    tensors however the tokens are routed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _products(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_rows = _products(gradient, weight.transpose(1, 2), ctx.counts) if ctx.needs_input_grad[0] else None
        to_weight = _outer_products(gradient, rows, ctx.counts) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, None


def _products(rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    if _on_device(rows, weight):
        return grouped_mm(rows, weight.transpose(1, 2), offs=_ends(counts, rows.device))
    groups = zip(rows.split(counts), weight.unbind(), strict=True)
    return torch.cat([torch.mm(group, own.T) for group, own in groups])


def _outer_products(gradient: Tensor, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    if _on_device(gradient, rows):
        product = grouped_mm(gradient.T, rows, offs=_ends(counts, rows.device))
        empty = [i for i, count in enumerate(counts) if not count]
        for i in empty:  # of which the kernel need not write anything
            product[i].zero_()
        return product
    return torch.stack([torch.mm(g.T, x) for g, x in zip(gradient.split(counts), rows.split(counts), strict=True)])


def _on_device(a: Tensor, b: Tensor) -> bool:
    """Whether the device's own kernel takes these: CUDA from Ampere on, bf16, rows of whole 16 bytes."""
    if a.device.type != "cuda" or a.dtype != torch.bfloat16 or grouped_mm is None or not len(a):
        return False
    aligned = all(size % 8 == 0 for matrix in (a, b) for size in matrix.shape[1:])
    return aligned and torch.cuda.get_device_capability(a.device) >= (8, 0)


def _ends(counts: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)
