"""What one rank moves in a step, worked out from the batch plan alone, and rows split and joined by where they go."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hetmesh.balance import BatchPlan, Runs, edge_layouts, route_runs
from hetmesh.balance.route_layouts import Side
from hetmesh.boundary.rank_step import rank_step
from hetmesh.errors import BoundaryError
from hetmesh.graph import Edge, Route
from hetmesh.layout import TransferPlan, plan_transfer
from hetmesh.schedule import Action, Schedule, windows


class StepTransfers:
    """The transfers of one rank in one step: made when they are asked for, or all at once by `prepare`.

    Pure Python and arrays: nothing here communicates, so another thread may prepare a step while one runs.
    `ranks_per_node`: for preferring senders on the receiver's node; None: all alike.
    """

    def __init__(self, plan: BatchPlan, schedule: Schedule, rank: int, ranks_per_node: int | None = None) -> None:
        self.plan, self.schedule, self.rank = plan, schedule, rank
        self._ranks_per_node = ranks_per_node
        self._forward = frozenset(schedule.stages.edges)
        self._plans: dict[Route, TransferPlan] = {}
        self._runs: dict[tuple[Edge, Side, int], Runs] = {}

    def prepare(self) -> None:
        """Work out everything that the actions of the rank will ask for."""
        routes, _ = self.schedule.routes, self.windows
        for action in self.schedule.of_rank(self.rank):
            if not isinstance(action.target, Edge):
                continue
            forward = action.target in self._forward
            along = action.route if forward else action.route.reversed
            for step in self.transfer(along, forward).steps:
                rank_step(step, self.rank)
            if routes.same_numbers(along.edge):
                continue
            graph, (edge, m, to) = self.plan.graph, along
            if self.rank in graph[edge.source.module].stage_mesh(edge.source.index):
                self.runs(edge, "source", m)
            if self.rank in graph[edge.destination.module].stage_mesh(edge.destination.index):
                self.runs(edge, "destination", to)

    @cached_property
    def windows(self) -> dict[Action, int]:
        """What the rank may begin before its place; see `hetmesh.schedule.windows`."""
        return windows(self.schedule, self.rank, self._stays)

    def _stays(self, route: Route) -> bool:
        """Whether what travels along a route, or its gradient along a reversed one, stays where it is on every rank."""
        forward = route.edge in self._forward
        return self.transfer(route if forward else route.reversed, forward).is_identity

    def transfer(self, route: Route, forward: bool) -> TransferPlan:
        """What moves along a forward route, or its gradient."""
        if route not in self._plans:
            shape, src, dst = edge_layouts(self.plan, *route)
            self._plans[route] = plan_transfer(shape, src, dst, ranks_per_node=self._ranks_per_node)
        plan = self._plans[route]
        return plan if forward else plan.transpose()

    def runs(self, edge: Edge, side: Side, microbatch: int) -> Runs:
        """`route_runs` of this rank."""
        key = (edge, side, microbatch)
        if key not in self._runs:
            self._runs[key] = route_runs(self.plan, edge, side, microbatch, self.rank)
        return self._runs[key]


class RoutedRows:
    """What one rank does with rows before they are sent and after they arrived, forward and backward alike: the rows of
    a microbatch, in the order of its module, are divided among the routes of an edge, and put back into that order. An
    edge between microbatches of the same number has nothing to do."""

    def __init__(self, transfers: StepTransfers) -> None:
        self.transfers, self.routes, self.rank = transfers, transfers.schedule.routes, transfers.rank
        self._arrived: dict[tuple[Edge, Side, int], dict[int, Tensor]] = {}

    def split(self, route: Route, rows: Tensor, side: Side) -> Tensor:
        """Those of `rows` that travel along a forward route, or their gradients back. `rows`: all rows of the
        microbatch on `side`, where they are sent from. Raises BoundaryError: there are more or fewer rows than
        planned."""
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
