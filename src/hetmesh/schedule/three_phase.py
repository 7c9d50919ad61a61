"""Three phases for colocated modules: encoders forward, the LLM's pipeline, encoders backward."""

from __future__ import annotations

from functools import lru_cache

from hetmesh.graph import Stage, StageGraph
from hetmesh.schedule.groups import Capped, caps_by_distance
from hetmesh.schedule.options import DEFAULT, PolicyOptions
from hetmesh.schedule.order import last_backwards, list_schedule, nominal, with_messages
from hetmesh.schedule.schedule import Action, Schedule
from hetmesh.schedule.validate import validate


@lru_cache(maxsize=64)
def three_phase(
    stages: StageGraph, microbatches: int, training: bool = True, options: PolicyOptions = DEFAULT
) -> Schedule:
    """A validated schedule in windows of microbatches, each in three phases (NVIDIA, arXiv 2605.27678, section 4):
    all other modules forward; 1F1B over the stages of the sink's module; all other modules backward.

    An encoder whose ranks are spread over the LLM's pipeline stages needs all of them at a time, while 1F1B staggers
    them: side by side they would wait for each other in every microbatch. The price is that the encoders' activations
    of a whole window stay alive, unless they are recomputed or offloaded. The LLM's gradients are reduced while the
    encoders run their last backwards.
    """
    window = min(options.window or microbatches, max(microbatches, 1))
    sink = stages.of_module(stages.sink.module)
    others = tuple(s for s in stages.stages if s not in sink)
    caps = {s: n for s, n in caps_by_distance(stages).items() if s in sink} | dict.fromkeys(others, window)
    order: list[Action] = []
    none: frozenset[Stage] = frozenset()
    for first in range(0, microbatches, window):
        some = range(first, min(first + window, microbatches))
        phases = [
            [Capped(s, stages, some, None, backwards=False) for s in others],
            [Capped(s, stages, some, caps[s], backwards=training) for s in reversed(sink)],
            [Capped(s, stages, some, None, forwards=False, backwards=training) for s in reversed(others)],
        ]
        for groups in phases:
            order += list_schedule(stages, groups, nominal(stages), none, order)
    actions = with_messages(order, stages, none, last_backwards(order, stages, none) if training else ())
    recomputed = frozenset(others) & stages.backward_stages if training else none
    return validate(
        Schedule(
            stages,
            microbatches,
            actions,
            training,
            none,
            caps,
            recompute=recomputed if options.recompute else none,
            offload=recomputed if options.offload else none,
        )
    )
