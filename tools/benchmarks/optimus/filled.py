"""bubble_fill of one encoder plan, and the search over plans."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.optimus import models
from benchmarks.optimus.bound import Bound, fill_bound, llm_alone
from benchmarks.optimus.encoder_plans import EncoderPlan, encoder_plans
from benchmarks.optimus.layouts import EARLY, colocated, step
from hetmesh.balance import BatchPlan
from hetmesh.errors import ScheduleError
from hetmesh.schedule import PolicyOptions, Schedule, peaks_in_flight
from hetmesh.simulate import StepModel, simulate
from hetmesh.simulate.fill_bubbles import fill_bubbles

IN_FLIGHT = 64  # samples of one replica whose activations an encoder stage may hold: 32 of the LLM's microbatches
TURNS = 3  # most stages of the encoder per rank; with more, the messages between them make its first rows late
MEMORY = 80e9  # bytes of a rank, which bound what is held, too


@dataclass(frozen=True)
class Filled:
    """A plan's step.

    Attributes:
        seconds: of the step.
        hidden: seconds of encoder kernels in the LLM's collectives, of the mean rank.
        work: seconds of the encoder on the rank that has most, its collectives included.
        traffic: seconds of summing the encoder's gradients over its lanes, on the rank that has most.
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


@dataclass(frozen=True)
class _Step:
    """The step of a plan without an order, and what none is below if the LLM is interleaved."""

    model: StepModel
    batch: BatchPlan
    bound: Bound


def plans(dp: int) -> list[EncoderPlan]:
    """The plans of an encoder for which its parameters and the LLM's fit. With the LLM's own degrees the encoder has
    its microbatches, too."""
    sizes = models.BATCH // dp, models.MICROBATCH, models.ENCODER_LAYERS
    each = encoder_plans(models.PP, models.TP, *sizes, virtual=TURNS)
    return [plan for plan in each if not _same(plan) or plan.microbatch == models.MICROBATCH]


def _same(plan: EncoderPlan) -> bool:
    return (plan.pp, plan.tp) == (models.PP, models.TP)


def _step(dp: int, plan: EncoderPlan, constants: dict[str, float], virtual: int) -> _Step | None:
    return _known(dp, plan, tuple(sorted(constants.items())), virtual)


@lru_cache(maxsize=256)
def _known(dp: int, plan: EncoderPlan, key: tuple[tuple[str, float], ...], virtual: int) -> _Step | None:
    """None where parameters do not fit into memory."""
    constants = dict(key)
    graph = colocated(dp, plan, virtual)
    model, batch = step(graph, constants, 0 if _same(plan) else plan.microbatch)
    static: dict[int, int] = {}
    for held in model.memory.values():
        for rank, memory in held.items():
            static[rank] = static.get(rank, 0) + memory.total
    if max(static.values()) > MEMORY:
        return None
    costs = model.costs(batch, Schedule(model.stages, batch.routes, ()))
    return _Step(model, batch, fill_bound(llm_alone(dp, constants), model.stages, batch.routes, costs, plan.pp))


def bound_of(dp: int, plan: EncoderPlan, constants: dict[str, float]) -> Bound | None:
    """What no order of a plan is below; None where its parameters do not fit into memory."""
    known = _step(dp, plan, constants, models.VIRTUAL)
    return known.bound if known is not None else None


def bounds(dp: int, constants: dict[str, float]) -> list[tuple[EncoderPlan, Bound]]:
    """The plans that fit, and what no order of theirs is below; the lowest first, and of equals more stages, which have
    less to sum."""
    each = ((plan, bound_of(dp, plan, constants)) for plan in sorted(plans(dp), reverse=True))
    return sorted(((plan, bound) for plan, bound in each if bound is not None), key=lambda pair: pair[1].seconds)


def fill(
    dp: int,
    plan: EncoderPlan,
    constants: dict[str, float],
    *,
    gaps: bool,
    refine: bool = True,
    inner: str = "interleaved",
) -> Filled | None:
    """The step of a plan; None where it does not fit into memory, or not with so few samples in flight.

    Args:
        gaps: whether encoder kernels run in the LLM's collectives, as in a run: what is begun there is over at its
            place in the schedule (`Schedule.in_collectives`).
        refine: False: the coarse placement.
        inner: the LLM's own schedule.
    """
    known = _step(dp, plan, constants, models.VIRTUAL if inner == "interleaved" else 1)
    if known is None:
        return None
    model, batch, bound = known.model, known.batch, known.bound
    samples = plan.lanes * plan.microbatch
    options = PolicyOptions(inner=inner, early=EARLY, refine=refine, in_flight=in_flight(plan), in_collectives=gaps)
    beside = ("vision",) if gaps else ()
    try:
        schedule = fill_bubbles(model, batch, True, options, beside=beside)
    except ScheduleError:  # the LLM's order needs more of the encoder at a time
        return None
    costs = model.costs(batch, schedule, parts=gaps)
    timeline = simulate(schedule, costs, beside=beside)
    if max(timeline.peak_bytes) > MEMORY:
        return None
    peaks = peaks_in_flight(schedule.actions, schedule.stages, schedule.routes, True, schedule.split)
    own = model.stages.of_module("vision")
    return Filled(
        plan,
        timeline.makespan,
        sum(timeline.hidden) / len(timeline.hidden),
        bound.work,
        bound.traffic,
        max(peaks[stage] for stage in own) * samples,
        max(timeline.peak_bytes),
    )


def in_flight(plan: EncoderPlan) -> int:
    """How many microbatches a stage of the encoder may hold."""
    return -(-IN_FLIGHT // (plan.lanes * plan.microbatch))


def best(dp: int, constants: dict[str, float], *, gaps: bool, without: Collection[EncoderPlan] = ()) -> Filled:
    """The fastest plan that fits; those of which no order is faster than what was found are not looked at.

    Args:
        without: plans that do not count.
    """
    found: Filled | None = None
    for plan, bound in bounds(dp, constants):
        if plan in without:
            continue
        if found is not None and bound.seconds >= found.seconds:
            break
        each = fill(dp, plan, constants, gaps=gaps)
        if each is not None and (found is None or each.seconds < found.seconds):
            found = each
    assert found is not None
    return found
