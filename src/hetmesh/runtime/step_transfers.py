"""StepTransfers: what one rank moves in a step, worked out from the batch plan alone, before the step or in it."""

from __future__ import annotations

from hetmesh.balance import BatchPlan, Runs, edge_layouts, route_runs
from hetmesh.balance.route_layouts import Side
from hetmesh.boundary.rank_step import rank_step
from hetmesh.graph import Edge, Route
from hetmesh.layout import TransferPlan, plan_transfer
from hetmesh.schedule import Schedule


class StepTransfers:
    """The transfers of one rank in one step: made when they are asked for, or all at once by `prepare`.

    Pure Python and arrays: nothing here communicates, so another thread may prepare a step while one runs.

    Args:
        ranks_per_node: for preferring senders on the receiver's node; None: all alike.
    """

    def __init__(self, plan: BatchPlan, schedule: Schedule, rank: int, ranks_per_node: int | None = None) -> None:
        self.plan, self.schedule, self.rank = plan, schedule, rank
        self._ranks_per_node = ranks_per_node
        self._forward = frozenset(schedule.stages.edges)
        self._plans: dict[Route, TransferPlan] = {}
        self._runs: dict[tuple[Edge, Side, int], Runs] = {}

    def prepare(self) -> None:
        """Work out everything that the actions of the rank will ask for."""
        routes = self.schedule.routes
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
