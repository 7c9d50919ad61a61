"""Rows of a microbatch, split by the microbatches that they go to and joined from those that they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from hetmesh.balance.route_layouts import Side
from hetmesh.errors import BoundaryError
from hetmesh.graph import Edge, Route
from hetmesh.runtime.step_transfers import StepTransfers


class RoutedRows:
    """What one rank does with rows before they are sent and after they arrived, forward and backward alike: the rows of
    a microbatch, in the order of its module, are divided among the routes of an edge, and put back into that order. An
    edge between microbatches of the same number has nothing to do."""

    def __init__(self, transfers: StepTransfers) -> None:
        self.transfers, self.routes, self.rank = transfers, transfers.schedule.routes, transfers.rank
        self._arrived: dict[tuple[Edge, Side, int], dict[int, Tensor]] = {}

    def split(self, route: Route, rows: Tensor, side: Side) -> Tensor:
        """Those of `rows` that travel along a forward route, or their gradients back.

        Args:
            rows: all rows of the microbatch on `side`, where they are sent from.

        Raises:
            BoundaryError: there are more or fewer rows than planned.
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

    def join(self, route: Route, rows: Tensor, side: Side) -> Tensor | None:
        """All rows of the microbatch on `side`, now that `rows` arrived along a forward route, or their gradients back;
        None until the rows of all routes have arrived."""
        edge = route.edge
        if self.routes.same_numbers(edge):
            return rows
        m, other = _microbatches(route, side)
        arrived = self._arrived.setdefault((edge, side, m), {})
        arrived[other] = rows
        routes = self.routes.into((edge,), m) if side == "destination" else self.routes.out_of((edge,), m)
        if len(arrived) < sum(1 for _ in routes):
            return None
        del self._arrived[edge, side, m]
        pieces, start = [], dict.fromkeys(arrived, 0)
        for to, n in self.transfers.runs(edge, side, m):
            if n:
                pieces.append(arrived[to][start[to] : start[to] + n])
                start[to] += n
        return pieces[0] if len(pieces) == 1 else torch.cat([rows[:0], *pieces])


def _microbatches(route: Route, side: Side) -> tuple[int, int]:
    """The microbatch on `side`, and on the other side."""
    return (route.source, route.destination) if side == "source" else (route.destination, route.source)
