"""`simulate`: what a schedule takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from hetmesh.cost.step_costs import StepCosts
from hetmesh.schedule import Schedule
from hetmesh.simulate.beside import BesideRun
from hetmesh.simulate.busy import slowed_program
from hetmesh.simulate.predicted_memory import peaks
from hetmesh.simulate.program import Run
from hetmesh.simulate.timeline import LAYERS, Spans, Timeline


def simulate(schedule: Schedule, costs: StepCosts, *, beside: Collection[str] = ()) -> Timeline:
    """What `schedule` takes if its actions take what `costs` says.

    Each rank runs its own subsequence of the order; an action that involves several ranks starts when all are free.
    With `costs.lanes` the lanes of a stage start apart, each when its own ranks are free and the rows that it
    gets have come; gradients are summed over all of them.
    A SEND starts at its place in the order of its sender, and takes no time of ranks but of links: every rank's
    outgoing link, and its incoming one of every edge, serve one transfer at a time, in the schedule's order. A RECV
    waits for the arrival. The parameters of a stage are gathered before its first forward, beside the wait for its
    input. Gradients are reduced beside later work of the same ranks. The optimizer starts on all ranks when the last of
    them has its gradients, because the gradient's norm is over all. Ranks of one node that compute at the same time
    slow each other down by `costs.busy_slowdown` (`hetmesh.simulate.busy`). The runtime's own `costs.action_overhead`
    follows each forward and backward; it keeps the rank, and no span covers it, because nothing is computed.

    Args:
        beside: modules whose actions run beside those of others, in their collectives (`hetmesh.simulate.beside`): what
            would be if they could, or what the runtime does where the schedule has `in_collectives`. Needs
            `costs.parts`.

    Raises:
        GraphError: there is no cost for a stage and microbatch, or `beside` cannot be.
    """
    columns = slowed_program(schedule, costs)
    run: Run = Run(columns)
    if beside:
        run = BesideRun(columns, schedule, costs, beside)
    run.actions()
    run.optimizer()
    held = tuple(tuple(columns.names[stage] for stage in stages) for stages in columns.held)
    work, transfers = _computing(Spans.of(run.work), costs.action_overhead), Spans.of(run.transfers)
    peak_bytes = tuple(peak.total for peak in peaks(schedule, costs, columns))
    of_tracks = (
        tuple(run.collectives),
        peak_bytes,
        tuple(run.hidden),
        Spans.of(zip(*run.side, strict=True) if run.side else [()] * 7),
    )
    return Timeline(columns.tracks, held, columns.names, work, transfers, run.end, *of_tracks)


def _computing(work: Spans, overhead: float) -> Spans:
    """Spans whose forwards and backwards end where computing does, as recorded ones end."""
    stops = np.where(np.isin(work.kind, LAYERS), np.maximum(work.start, work.stop - overhead), work.stop)
    return replace(work, stop=stops)
