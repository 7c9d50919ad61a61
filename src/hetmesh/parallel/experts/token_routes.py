"""Token routes: rows that are copied to several places, and what comes back from there summed in a fixed order.

Routing does this twice: a token goes to each rank that holds one of its experts, and there to each of these experts.
Both ways, forward and backward, are then one pair of transposed operations: `spread` copies, `collect` sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRoute:
    """Which row each copy is of, and where the copies of each row are.

    Attributes:
        source: int64 `[copies]`: the row of each copy.
        places: int64 `[rows, most]`: the copies of each row, in the order of their sum; from `copies` on none.
        full: whether every row has `most` copies.
    """

    source: Tensor
    places: Tensor
    full: bool = False


def route_to_ranks(wanted: Tensor, copies: int, most: int) -> TokenRoute:
    """Rows to ranks: copies lie rank by rank, each with its rows in their order, and are summed by rank.

    Args:
        wanted: bool `[rows, ranks]`: which rank gets which row.
        copies: how many are wanted: known beforehand, or the host would wait for the device.
        most: the most ranks that a row can go to.
    """
    rows, ranks = wanted.shape
    flat = wanted.T.reshape(-1)
    order = torch.argsort(flat.to(torch.uint8), descending=True, stable=True)[:copies]
    at = (flat.cumsum(0) - 1).masked_fill(~flat, copies).view(ranks, rows).T
    return TokenRoute(order % max(rows, 1), at.sort(dim=1).values[:, :most].contiguous(), full=ranks == 1)


def route_to_experts(experts: Tensor, pairs: int) -> tuple[TokenRoute, Tensor]:
    """Rows to experts: copies lie expert by expert, each with its rows in their order, and are summed in the order of
    a row's own choice: the sum of a token must not depend on how experts are numbered or placed.

    Args:
        experts: int64 `[rows, chosen]`: numbers among the experts held here, past the last for those elsewhere.
        pairs: choices held here: known beforehand, or the host would wait for the device.

    Returns:
        The route, and which of the flat choices each copy is, int64 `[pairs]`.
    """
    rows, chosen = experts.shape
    order = torch.argsort(experts.reshape(-1), stable=True)[:pairs]
    places = torch.full((rows * chosen,), pairs, dtype=torch.int64, device=experts.device)
    places[order] = torch.arange(pairs, device=experts.device)
    return TokenRoute(order // max(chosen, 1), places.view(rows, chosen), full=pairs == rows * chosen), order


def spread(rows: Tensor, route: TokenRoute) -> Tensor:
    """`[rows, features]` -> a copy of each in all its places, `[copies, features]`."""
    return _Spread.apply(rows, route)


def collect(copies: Tensor, route: TokenRoute) -> Tensor:
    """`[copies, features]` -> the sum of each row's, `[rows, features]`; half precision is summed in fp32."""
    return _Collect.apply(copies, route)


def sum_places(copies: Tensor, route: TokenRoute) -> Tensor:
    """`collect` without autograd: one addition per place, so that the order of summands is that of `route.places`."""
    places, number = route.places, len(copies)
    half = copies.dtype in (torch.float16, torch.bfloat16)
    total = copies.new_zeros(len(places), *copies.shape[1:], dtype=torch.float32 if half else None)
    if not number:
        return total.to(copies.dtype)
    for place in places.unbind(1):
        if route.full:
            total += copies.index_select(0, place)
        else:
            piece = copies.index_select(0, place.clamp(max=number - 1))
            total += piece.masked_fill_((place >= number)[:, None], 0)
    return total.to(copies.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: TokenRoute) -> Tensor:
        ctx.save_for_backward(route.source, route.places)
        ctx.full = route.full
        return rows.index_select(0, route.source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        source, places = ctx.saved_tensors
        return sum_places(gradients[0], TokenRoute(source, places, ctx.full)), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, route: TokenRoute) -> Tensor:
        ctx.save_for_backward(route.source)
        return sum_places(copies, route)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        return gradients[0].index_select(0, source), None
