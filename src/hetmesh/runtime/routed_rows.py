"""Rows of a microbatch, parted among the microbatches that they go to and put together from those they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from hetmesh.balance.routes import Side
from hetmesh.errors import BoundaryError
from hetmesh.graph import Edge, Route
from hetmesh.runtime.step_transfers import StepTransfers


class RoutedRows:
    """What one rank does with rows before they are sent and after they came, forward and backward alike: the rows of a
    microbatch, in the order in which its module has them, are dealt out to the routes of an edge, and put back into
    that order. Where an edge joins the same number on both sides there is nothing to do."""

    def __init__(self, transfers: StepTransfers) -> None:
        self.transfers, self.routes, self.rank = transfers, transfers.schedule.routes, transfers.rank
        self._came: dict[tuple[Edge, Side, int], dict[int, Tensor]] = {}

    def part(self, route: Route, rows: Tensor, side: Side) -> Tensor:
        """Those of `rows` that travel along a forward route, or their gradients back.

        Args:
            rows: all of the microbatch on `side`, where they are sent from.

        Raises:
            BoundaryError: they are not as many as promised.
        """
        if self.routes.same_numbers(route.edge):
            return rows
        m, other = _microbatches(route, side)
        runs = self.transfers.runs(route.edge, side, m)
        if (count := sum(n for _, n in runs)) != len(rows):
            raise BoundaryError(
                f"microbatch {m}: {route.edge} was promised {count} rows on rank {self.rank}, got {len(rows)}"
            )
        pieces, start = [], 0
        for to, n in runs:
            if to == other:
                pieces.append(rows[start : start + n])
            start += n
        return pieces[0] if len(pieces) == 1 else torch.cat([rows[:0], *pieces])

    def joined(self, route: Route, rows: Tensor, side: Side) -> Tensor | None:
        """All rows of the microbatch on `side`, where `rows` came along a forward route, or their gradients back; None
        while others have yet to come."""
        edge = route.edge
        if self.routes.same_numbers(edge):
            return rows
        m, other = _microbatches(route, side)
        came = self._came.setdefault((edge, side, m), {})
        came[other] = rows
        wanted = self.routes.into((edge,), m) if side == "destination" else self.routes.out_of((edge,), m)
        if len(came) < sum(1 for _ in wanted):
            return None
        del self._came[edge, side, m]
        pieces, start = [], dict.fromkeys(came, 0)
        for to, n in self.transfers.runs(edge, side, m):
            if n:
                pieces.append(came[to][start[to] : start[to] + n])
                start[to] += n
        return pieces[0] if len(pieces) == 1 else torch.cat([rows[:0], *pieces])


def _microbatches(route: Route, side: Side) -> tuple[int, int]:
    """Of `side`, and of the other."""
    return (route.source, route.destination) if side == "source" else (route.destination, route.source)
