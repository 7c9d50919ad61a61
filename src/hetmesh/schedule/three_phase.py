"""Three phases for colocated modules: encoders forward, the LLM's pipeline, encoders backward."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Routes, Stage, StageGraph
from hetmesh.schedule.groups import Capped, caps_by_distance
from hetmesh.schedule.held import peaks_in_flight
from hetmesh.schedule.one_by_one import by_stage, one_by_one
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.order import last_backwards, list_schedule, nominal, with_messages
from hetmesh.schedule.schedule import Action, Kind, Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def three_phase(
    stages: StageGraph, microbatches: Routes | int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in windows of microbatches of the sink, each in three phases (NVIDIA, arXiv 2605.27678,
    section 4): what it needs of all other modules forward; 1F1B over the stages of the sink's module; all other modules
    backward.

    An encoder whose ranks are spread over the LLM's pipeline stages needs all of them at a time, while 1F1B staggers
    them: side by side they would wait for each other in every microbatch. The price is that the encoders' activations
    of a whole window stay alive, unless they are recomputed or offloaded. The LLM's gradients are reduced while the
    encoders run their last backwards.
    """
    routes = Routes.of(stages, microbatches)
    steps = one_by_one(stages, routes, training)
    window = min(options.window or len(steps), max(len(steps), 1))
    sink = stages.of_module(stages.sink.module)
    others = tuple(s for s in stages.stages if s not in sink)
    caps = {s: n for s, n in caps_by_distance(stages, routes, steps).items() if s in sink}
    order: list[Action] = []
    none: frozenset[Stage] = frozenset()
    for first in range(0, len(steps), window):
        some = steps[first : first + window]
        forwards, backwards = by_stage(some, Kind.FORWARD), by_stage(some, Kind.BACKWARD)
        phases = [
            [Capped(s, stages, routes, None, forwards=forwards.get(s, ())) for s in others],
            [
                Capped(s, stages, routes, caps[s], forwards=forwards.get(s, ()), backwards=backwards.get(s, ()))
                for s in reversed(sink)
            ],
            [Capped(s, stages, routes, None, backwards=backwards.get(s, ())) for s in reversed(others)],
        ]
        for groups in phases:
            order += list_schedule(stages, routes, groups, nominal(stages, routes), none, order)
    actions = with_messages(order, stages, routes, none, last_backwards(order, stages, none) if training else ())
    recomputed = frozenset(others) & stages.backward_stages if training else none
    held = peaks_in_flight(order, stages, routes, training)
    return validate(
        Schedule(
            stages,
            routes,
            actions,
            training,
            none,
            caps | {s: max(window, held[s]) for s in others},
            recompute=recomputed if options.recompute else none,
            offload=recomputed if options.offload else none,
        )
    )
