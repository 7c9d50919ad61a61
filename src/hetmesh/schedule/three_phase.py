"""Three phases for colocated modules: encoders forward, the LLM's pipeline, encoders backward."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Routes, StageGraph
from hetmesh.schedule.list_schedule import capped_stages, caps_by_distance, list_schedule, nominal
from hetmesh.schedule.schedule import (
    DEFAULT,
    NO_STAGES,
    Action,
    Kind,
    PolicyOptions,
    Schedule,
    peaks_in_flight,
    schedule_of,
)
from hetmesh.schedule.sequential import one_by_one


@lru_cache(maxsize=64)
def three_phase(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in windows of the LLM's microbatches, each of three phases (NVIDIA, arXiv 2605.27678,
    section 4): what it needs of others forward; 1F1B over the stages of the LLM and of modules after it; all other
    modules backward.

    An encoder whose ranks are spread over the LLM's pipeline stages needs all of them at a time, while 1F1B staggers
    them: side by side they would wait for each other in every microbatch. The price is that the encoders' activations
    of a whole window stay alive, unless they are recomputed or offloaded. The LLM's gradients are reduced while the
    encoders run their last backwards.
    """
    routes = Routes.of(stages, microbatches)
    steps = one_by_one(stages, routes, training)
    window = min(options.window or len(steps), max(len(steps), 1))
    llm = tuple(s for s in stages.stages if s.module == stages.llm.module or s in stages.after_llm)
    others = tuple(s for s in stages.stages if s not in llm)
    caps = {s: n for s, n in caps_by_distance(stages, routes, steps).items() if s in llm}
    order: list[Action] = []
    for first in range(0, len(steps), window):
        some = steps[first : first + window]
        phases = [
            capped_stages(others, stages, routes, some, None, kinds=[Kind.FORWARD]),
            capped_stages(reversed(llm), stages, routes, some, caps),
            capped_stages(reversed(others), stages, routes, some, None, kinds=[Kind.BACKWARD]),
        ]
        for groups in phases:
            order += list_schedule(stages, routes, groups, nominal(stages, routes), given=order)
    recomputed = frozenset(others) & stages.backward_stages if training else NO_STAGES
    held = peaks_in_flight(order, stages, routes, training)
    in_flight = caps | {s: max(window, held[s]) for s in others}
    recompute, offload = (recomputed if wanted else NO_STAGES for wanted in (options.recompute, options.offload))
    return schedule_of(
        order,
        stages,
        routes,
        training,
        in_flight,
        validated=options.validated,
        recompute=recompute,
        offload=offload,
    )
