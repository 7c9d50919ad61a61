"""The engine: one pass over the order, since every rank's work is a subsequence of it and dependencies come first."""

from __future__ import annotations

from hetmesh.cost.step_costs import StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.busy import slowed_program
from hetmesh.simulate.memory import peak_bytes
from hetmesh.simulate.program import RECEIVE, Program
from hetmesh.simulate.timeline import FORWARD, GATHER, OPTIMIZER, REDUCE, TRANSFER, Spans, Timeline


def simulate(schedule: Schedule, costs: StepCosts, *, overlap: bool = True) -> Timeline:
    """What `schedule` takes if its actions take what `costs` says.

    Each rank runs its own subsequence of the order; an action that involves several ranks starts when all are free.
    A SEND starts at its place in the order of its sender, and takes no time of ranks but of links: every rank's
    outgoing and every rank's incoming link serve one transfer at a time, in the schedule's order. A RECV waits for the
    arrival. The parameters of a stage are gathered before its first forward, beside the wait for its input. Gradients
    are reduced beside later work of the same ranks. The optimizer starts on all ranks when the last of them has its
    gradients, because the gradient's norm is over all. Ranks of one node that compute at the same time slow each other
    down by `costs.busy_slowdown` (`hetmesh.simulate.busy`).

    Args:
        overlap: False: a transfer takes the time of the ranks on both its sides, as a blocking send would.

    Raises:
        GraphError: there is no cost for a stage and microbatch.
    """
    columns = slowed_program(schedule, costs, overlap=overlap)
    run = _Run(columns, schedule.microbatches, overlap)
    run.actions()
    run.optimizer()
    held = tuple(tuple(columns.names[stage] for stage in stages) for stages in columns.held)
    return Timeline(
        columns.rows,
        held,
        columns.names,
        Spans.of(run.work),
        Spans.of(run.transfers),
        run.end,
        tuple(run.collectives),
        peak_bytes(schedule, columns),
    )


class _Run:
    """The state of a simulation: when rows and links are free, when transfers arrived, and the spans so far."""

    def __init__(self, columns: Program, microbatches: int, overlap: bool) -> None:
        self.columns, self.microbatches, self.overlap = columns, microbatches, overlap
        rows = len(columns.rows)
        self.free = [0.0] * rows  # when a row can go on, waits included
        self.idle = [0.0] * rows  # when its last work ended
        self.reduced = [0.0] * rows
        self.outgoing, self.incoming = [0.0] * rows, [0.0] * rows
        self.collectives = [0.0] * rows
        self.work: tuple[list[float], ...] = ([], [], [], [], [], [])
        self.transfers: tuple[list[float], ...] = ([], [], [], [], [], [])
        self.end = 0.0

    def actions(self) -> None:
        c, free, idle = self.columns, self.free, self.idle
        stage_rows, sources, destinations, inside = c.stage_rows, c.sources, c.destinations, self.collectives
        count, overlap, gather = self.microbatches, self.overlap, list(c.gather)
        arrivals = [0.0] * (len(sources) * count)
        row_append, kind_append, target_append, microbatch_append, start_append, stop_append = (
            column.append for column in self.work
        )
        for kind, target, m, seconds, collectives in zip(
            c.kinds, c.targets, c.microbatches, c.seconds, c.collectives, strict=True
        ):
            if kind == RECEIVE:
                arrival = arrivals[target * count + m]
                for row in stage_rows[destinations[target]]:
                    if free[row] < arrival:
                        free[row] = arrival
            elif kind == TRANSFER:
                transfer = self._linked if overlap else self._blocking
                arrivals[target * count + m] = transfer(target, m, seconds)
            elif kind == REDUCE:
                self._reduce(target, seconds)
            else:
                rows = stage_rows[target]
                if kind == FORWARD and gather[target]:
                    self._gather(target)
                    gather[target] = 0.0
                start = free[rows[0]]
                if len(rows) > 1:
                    start = max([free[row] for row in rows])
                stop = start + seconds
                for row in rows:
                    free[row] = idle[row] = stop
                    inside[row] += collectives
                    row_append(row)
                    kind_append(kind)
                    target_append(target)
                    microbatch_append(m)
                    start_append(start)
                    stop_append(stop)

    def optimizer(self) -> None:
        """What follows the last action; sets `end`."""
        ready = max([*self.free, *self.reduced, *self.outgoing, *self.incoming], default=0.0)
        for row, seconds in enumerate(self.columns.optimizer):
            if seconds:
                self._span(row, OPTIMIZER, -1, -1, ready, ready + seconds)
        self.end = ready + max(self.columns.optimizer, default=0.0)

    def _linked(self, edge: int, m: int, seconds: float) -> float:
        """A transfer on links of its own; its arrival."""
        c, outgoing, incoming = self.columns, self.outgoing, self.incoming
        sources, destinations = c.stage_rows[c.sources[edge]], c.stage_rows[c.destinations[edge]]
        start = max([self.free[row] for row in sources])
        if not seconds:
            return start
        for row in sources:
            if outgoing[row] > start:
                start = outgoing[row]
        for row in destinations:
            if incoming[row] > start:
                start = incoming[row]
        stop = start + seconds
        for row in sources:
            outgoing[row] = stop
        for row in destinations:
            incoming[row] = stop
            self._transfer(row, edge, m, start, stop)
        return stop

    def _blocking(self, edge: int, m: int, seconds: float) -> float:
        """A transfer for which both sides stop; its arrival."""
        c, free = self.columns, self.free
        if not seconds:
            return max(free[row] for row in c.stage_rows[c.sources[edge]])
        destinations = c.stage_rows[c.destinations[edge]]
        rows = {*c.stage_rows[c.sources[edge]], *destinations}
        start = max(free[row] for row in rows)
        stop = start + seconds
        for row in rows:
            free[row] = self.idle[row] = stop
        for row in destinations:
            self._transfer(row, edge, m, start, stop)
        return stop

    def _gather(self, stage: int) -> None:
        rows = self.columns.stage_rows[stage]
        start = max(self.idle[row] for row in rows)
        stop = start + self.columns.gather[stage]
        for row in rows:
            self.idle[row] = stop
            self.free[row] = max(self.free[row], stop)
            self._span(row, GATHER, stage, -1, start, stop)

    def _reduce(self, stage: int, seconds: float) -> None:
        rows = self.columns.stage_rows[stage]
        start = max(max(self.free[row], self.reduced[row]) for row in rows)
        for row in rows:
            self.reduced[row] = start + seconds
            self._span(row, REDUCE, stage, -1, start, start + seconds)

    def _span(self, row: int, kind: int, target: int, m: int, start: float, stop: float) -> None:
        for column, value in zip(self.work, (row, kind, target, m, start, stop), strict=True):
            column.append(value)

    def _transfer(self, row: int, edge: int, m: int, start: float, stop: float) -> None:
        target = len(self.columns.stage_rows) + edge
        for column, value in zip(self.transfers, (row, TRANSFER, target, m, start, stop), strict=True):
            column.append(value)
