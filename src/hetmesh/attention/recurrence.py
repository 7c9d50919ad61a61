"""Recurrences and convolutions over the rows of a `ContextAttention`: anew at each sample, and on across ranks.

What a piece of a sample (`hetmesh.context.pieces`) does to the state S of a head is an affine map, S -> A S + B. Each
rank makes [B | A] of its pieces before a cut by running the rule itself on [0 | I]. The maps go to ranks by heads, each
of which goes through all pieces of its heads in the order of their positions, and the states at the cuts go back to the
ranks that go on from them: what is sent depends on the number of cuts alone, not on lengths, ranks or who owns which
piece. The backward is the transpose. Maps are fp32: A only shrinks (|I - b k k^T| <= 1) and nothing is divided, so the
error is that of one scan; in bf16 it would be 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from hetmesh.attention.attention_plan import TakenRows, taken_rows
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.delta_rule import convolve, delta_rule
from hetmesh.attention.fetch import Wires, collect, exchange, fetch, give_back
from hetmesh.attention.flex import on_device
from hetmesh.context import Mask
from hetmesh.context.mask_sources import merge, ragged
from hetmesh.context.pieces import Pieces, plan_pieces
from hetmesh.layout import Intervals, Layout, MeshSpec, RowSplit, TransferPlan, plan_transfer


@dataclass(frozen=True, eq=False)
class Halo:
    """What a causal convolution reads. Its rows are this rank's, then those of `taken`, then one of zeros.

    Attributes:
        taken: the rows in front of pieces that go on.
        rows: int64: what the convolution runs over: in front of each piece its `kernel - 1` rows, or zeros.
        out: int64: where in that each of this rank's rows is.
    """

    taken: TakenRows
    rows: np.ndarray
    out: np.ndarray


@lru_cache(maxsize=128)
def plan_halo(mask: Mask, shares: tuple[Intervals, ...], coordinate: int, kernel: int) -> Halo:
    """The halo of one rank's pieces for a convolution over `kernel` tokens."""
    reach = kernel - 1
    taken = []
    for rank in range(len(shares)):
        pieces = plan_pieces(mask, shares, rank)
        first, stop = np.maximum(pieces.samples, pieces.starts - reach), pieces.starts
        spans = merge(first[first < stop], stop[first < stop])
        taken.append(tuple(zip(*(edges.tolist() for edges in spans), strict=True)))
    pieces = plan_pieces(mask, shares, coordinate)
    own, sizes = int(pieces.bounds[-1]), np.diff(pieces.bounds)
    held = np.array([p for a, b in taken[coordinate] for p in range(a, b)], np.int64)
    front = pieces.starts[:, None] + np.arange(-reach, 0)  # [pieces, reach], positions
    found = np.searchsorted(held, front)
    front = np.where(front >= pieces.samples[:, None], own + found, own + len(held))
    out = np.arange(own) + reach * np.repeat(np.arange(1, len(sizes) + 1), sizes)
    rows = np.empty(own + reach * len(sizes), np.int64)
    rows[out] = np.arange(own)
    rows[(pieces.bounds[:-1] + reach * np.arange(len(sizes)))[:, None] + np.arange(reach)] = front
    return Halo(taken_rows(tuple(taken), shares, coordinate), rows, out)


def shared_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: ContextAttention
) -> Tensor:
    """`convolve` of the rows of `state`, `[rows, features]`. Collective over its group where it has cuts."""
    halo = plan_halo(state.mask, state.shares, state.coordinate, weight.shape[1])
    source = [x]
    if len(_pieces(state).cuts):
        source.append(_Halo.apply(x[: state.rows], state, halo))
    source.append(x.new_zeros(1, x.shape[1]))
    rows, out = (on_device(index, x.device) for index in (halo.rows, halo.out))
    return convolve(torch.cat(source)[rows], weight, bias, activation)[out]


def shared_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: ContextAttention, normalize: bool
) -> Tensor:
    """`delta_rule` of the rows of `state`: each sample starts from a state of zeros. Collective over its group where
    it has cuts."""
    pieces = _pieces(state)
    cuts, count, heads, width = pieces.cuts, len(pieces.starts), v.shape[1], (k.shape[-1], v.shape[-1])
    if not len(cuts):
        return delta_rule(q, k, v, g, beta, pieces.bounds, normalize=normalize)[0]
    dtype = torch.promote_types(v.dtype, torch.float32)
    maps = k.new_zeros(0, heads, width[0], sum(width), dtype=dtype)
    if len(cuts.leaving):
        spans = pieces.bounds[cuts.leaving[:, None] + np.arange(2)]
        chosen = on_device(ragged(*spans.T)[1], k.device)
        identity = torch.eye(width[0], sum(width), dtype=dtype, device=k.device).roll(width[1], 1)
        maps = delta_rule(
            None,
            k[chosen],
            torch.cat([v, v.new_zeros(*v.shape[:2], width[0])], -1)[chosen],
            g[chosen],
            beta[chosen],
            np.append(0, np.diff(spans).cumsum()),
            initial_state=identity.expand(len(spans), heads, -1, -1),
            normalize=normalize,
        )[1]
    entered, k = _States.apply(maps, k, state, pieces)
    into = on_device(cuts.entering, k.device)
    initial = maps.new_zeros(count, heads, *width).index_copy(0, into, entered)
    return delta_rule(q, k, v, g, beta, pieces.bounds, initial_state=initial, normalize=normalize)[0]


def _pieces(state: ContextAttention) -> Pieces:
    return plan_pieces(state.mask, state.shares, state.coordinate)


def _wires(state: ContextAttention, what: str) -> Wires:
    assert state.wires is not None
    return replace(state.wires, name=f"{state.name.removesuffix(' attention').removesuffix(' cp')} cp {what}")


class _Halo(torch.autograd.Function):
    """The rows in front of pieces that go on, from the ranks that have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ContextAttention, halo: Halo) -> Tensor:
        ctx.wires, ctx.shares = _wires(state, "halo"), RowSplit(0, state.shares)
        ctx.taken, ctx.rows = halo.taken, len(x)
        return fetch(ctx.wires, ctx.shares, halo.taken, 0, x.contiguous(), "forward")()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dx = gradients[0].new_zeros(ctx.rows, *gradients[0].shape[1:])
        collect(dx, ctx.taken, give_back(ctx.wires, ctx.shares, ctx.taken, 0, gradients[0].contiguous()))
        return dx, None, None


class _States(torch.autograd.Function):
    """The states from which this rank's pieces go on behind cuts, given the maps of its pieces before cuts. `k` passes
    through, so that on every rank the backward comes between those of the rule and of the convolution."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, k: Tensor, state: ContextAttention, pieces: Pieces) -> tuple[Tensor, Tensor]:
        cuts, wires = pieces.cuts, _wires(state, "states")
        before, behind = (wires.mesh, cuts.before), (wires.mesh, cuts.behind)
        shape = (len(cuts), *maps.shape[1:])
        by_heads = exchange(wires, _plan(*before, shape, True), maps.contiguous(), wires.label("forward"))()
        into, onto = by_heads.split([shape[-1] - shape[-2], shape[-2]], -1)
        states: list[Tensor] = []
        for cut, chained in enumerate(cuts.chained.tolist()):
            states.append(into[cut] + onto[cut] @ states[-1] if chained else into[cut])
        shape = (*shape[:3], shape[-1] - shape[-2])
        entered = exchange(wires, _plan(*behind, shape, False), torch.stack(states), wires.label("forward"))()
        ctx.save_for_backward(onto, entered)
        ctx.wires, ctx.cuts, ctx.before, ctx.behind, ctx.shape = wires, cuts, before, behind, shape
        return entered, k.view_as(k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        onto, entered = ctx.saved_tensors
        wires, cuts, label = ctx.wires, ctx.cuts, ctx.wires.label("backward")
        totals = exchange(wires, _plan(*ctx.behind, ctx.shape, True), gradients[0].contiguous(), label)().clone()
        for cut in range(len(cuts) - 1, 0, -1):
            if cuts.chained[cut]:
                totals[cut - 1] += onto[cut].mT @ totals[cut]
        to_maps = exchange(wires, _plan(*ctx.before, ctx.shape, False), totals, label)()
        of = on_device(cuts.of_entering, entered.device)
        # What a piece at the beginning of a sample would do to a state is asked for by nobody.
        was = torch.cat([entered, entered.new_zeros(1, *entered.shape[1:])])[of]
        return torch.cat([to_maps, to_maps @ was.mT], -1), gradients[1], None, None


@lru_cache(maxsize=256)
def _plan(mesh: MeshSpec, rows: RowSplit, shape: tuple[int, ...], to_heads: bool) -> TransferPlan:
    """From rows by cuts to all cuts by heads, or back."""
    layouts = Layout(mesh, (rows,)), Layout(mesh, (Shard(1),))
    return plan_transfer(shape, *(layouts if to_heads else layouts[::-1]))
