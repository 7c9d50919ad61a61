"""What the caller of `hetmesh.train` does after each step."""

from __future__ import annotations

from collections.abc import Callable

from hetmesh.boundary import World
from hetmesh.boundary.scalars import reduce_over_ranks
from hetmesh.records.metrics import StepMetrics

OnStep = Callable[[StepMetrics], bool | None]
"""Called on every rank after each step, with equal losses and norms; True, on any rank, ends the run after it."""


def says_stop(on_step: OnStep | None, metrics: StepMetrics, world: World) -> bool:
    """Call `on_step`; whether it says on any rank that the run ends. Collective where there is an `on_step`.

    Raises:
        TypeError: it returns neither None nor a bool.
    """
    if on_step is None:
        return False
    answer = on_step(metrics)
    if answer is not None and not isinstance(answer, bool):
        raise TypeError(f"on_step must return None, or True to end the run, got {answer!r}")
    return reduce_over_ranks([bool(answer)], world)[0] > 0
