"""bubble_fill of one encoder plan, and the search over plans."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.optimus import models
from benchmarks.optimus.layouts import EARLY, colocated, step
from hetmesh.errors import ScheduleError
from hetmesh.planner.encoder_plans import EncoderPlan, encoder_plans
from hetmesh.planner.fill_bubbles import fill_bubbles
from hetmesh.schedule import PolicyOptions, Schedule, peaks_in_flight
from hetmesh.simulate import simulate

IN_FLIGHT = 64  # samples of one replica whose activations an encoder stage may hold: 32 of the LLM's microbatches
MEMORY = 80e9  # bytes of a rank, which bound what is held, too


@dataclass(frozen=True)
class Filled:
    """A plan's step.

    Attributes:
        seconds: of the step.
        hidden: seconds of encoder kernels in the LLM's collectives, of the mean rank.
        work: seconds of the encoder on the rank that has most, its collectives included.
        traffic: seconds of summing the encoder's gradients over its lanes.
        held: most samples of one replica that an encoder stage held.
        peak: bytes of the rank that holds most, predicted by the schedule's order.
    """

    plan: EncoderPlan
    seconds: float
    hidden: float
    work: float
    traffic: float
    held: int
    peak: int


def plans(dp: int) -> list[EncoderPlan]:
    """The plans of an encoder for which its parameters and the LLM's fit. With the LLM's own degrees the encoder has
    its microbatches, too."""
    found = []
    for plan in encoder_plans(models.PP, models.TP, models.BATCH // dp, models.MICROBATCH, models.ENCODER_LAYERS):
        same = (plan.pp, plan.tp) == (models.PP, models.TP)
        if not same or plan.microbatch == models.MICROBATCH:
            found.append(plan)
    return found


def fill(
    dp: int,
    plan: EncoderPlan,
    constants: dict[str, float],
    *,
    gaps: bool,
    refine: bool = True,
    inner: str = "interleaved",
    within: tuple[float, float] = (0.0, float("inf")),
) -> Filled | None:
    """The step of a plan; None where it does not fit into memory, or not with so few samples in flight.

    Args:
        gaps: whether encoder kernels run in the LLM's collectives.
        refine: False: the coarse placement.
        inner: the LLM's own schedule.
        within: seconds of the LLM alone, and of the best plan so far: with the sums of its gradients, which come last,
            a plan must be able to be below.
    """
    same = (plan.pp, plan.tp) == (models.PP, models.TP)
    graph = colocated(dp, plan, models.VIRTUAL if inner == "interleaved" else 1)
    model, batch = step(graph, constants, 0 if same else plan.microbatch)
    static: dict[int, int] = {}
    for held in model.memory.values():
        for rank, memory in held.items():
            static[rank] = static.get(rank, 0) + memory.total
    if max(static.values()) > MEMORY:
        return None
    own = model.stages.of_module("vision")
    empty = model.costs(batch, Schedule(model.stages, batch.routes, ()))
    if within[0] + max(empty.reduce[stage] for stage in own) >= within[1]:
        return None
    samples = plan.lanes * plan.microbatch
    options = PolicyOptions(inner=inner, early=EARLY, refine=refine, in_flight=-(-IN_FLIGHT // samples))
    beside = ("vision",) if gaps else ()
    try:
        schedule = fill_bubbles(model, batch, True, options, beside=beside)
    except ScheduleError:  # the LLM's order needs more of the encoder at a time
        return None
    costs = model.costs(batch, schedule, parts=gaps)
    timeline = simulate(schedule, costs, beside=beside)
    if max(timeline.peak_bytes) > MEMORY:
        return None
    each = [[costs.stages[stage, m] for m in range(batch.routes.count("vision"))] for stage in own]
    work = [sum(cost.forward + cost.backward for cost in some) for some in each]
    peaks = peaks_in_flight(schedule.actions, schedule.stages, schedule.routes, True, schedule.split)
    return Filled(
        plan,
        timeline.makespan,
        sum(timeline.hidden) / len(timeline.hidden),
        max(work),
        max(costs.reduce[stage] for stage in own),
        max(peaks[stage] for stage in own) * samples,
        max(timeline.peak_bytes),
    )


def best(dp: int, constants: dict[str, float], llm: float, *, gaps: bool) -> Filled:
    """The fastest plan that fits.

    Args:
        llm: seconds of the LLM alone.
    """
    found: Filled | None = None
    for plan in sorted(plans(dp), reverse=True):  # more stages have less to sum
        limit = found.seconds if found else float("inf")
        each = fill(dp, plan, constants, gaps=gaps, within=(llm, limit))
        if each is not None and each.seconds < limit:
            found = each
    assert found is not None
    return found
