"""The phases of a run whose data change, what is certified of each, and where another layout pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetmesh.errors import HetmeshError
from hetmesh.planner import LayoutPlan, MacroBatch, Prediction, Predictor, Problem, search
from hetmesh.planner.predict import MIN_LANES
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.planning import certified, recipe_macro_batch

PARTS = 4
"""Phases of a run whose samples come in an order other than shuffled: nobody says where such data change."""

MIN_GAIN = 0.05
"""Part of a phase's step that another layout must save: predictions err by about as much, and a run must be stopped,
its checkpoint read in the other layout, and started."""


@dataclass(frozen=True)
class PhasePlan:
    """What is planned for one phase.

    Attributes:
        steps: of the run, from 0.
        macro: what is certified of how its data part ranks; None: there is nothing to part.
        best: the fastest layout for it; None: none fits.
        kept: the layout of the phases before, with these data; None: there is none, or it does not fit.
        first: whether it is the first phase.
    """

    steps: range
    macro: MacroBatch | None
    best: Prediction | None
    kept: Prediction | None = None
    first: bool = False

    @property
    def saved(self) -> float:
        """Part of a step that the fastest layout saves over the one that there is."""
        if self.best is None or self.first:
            return 0.0
        return 1.0 if self.kept is None else 1 - self.best.step_s / self.kept.step_s

    @property
    def pays(self) -> bool:
        """Whether a checkpoint should be resumed in the fastest layout where the phase begins."""
        return self.saved > MIN_GAIN


def run_phases(recipe: Recipe) -> tuple[range, ...]:
    """The steps of each phase: of `[[data.phases]]`, of `PARTS` equal parts where samples are not shuffled, or all."""
    total, keys = recipe.training.steps, recipe.data
    if keys.phases:
        starts = [phase.start_step for phase in keys.phases if phase.start_step < total]
    else:
        parts = 1 if keys.order == "shuffled" else min(PARTS, total)
        starts = [k * total // parts for k in range(parts)]
    return tuple(itertools.starmap(range, itertools.pairwise([*starts, total])))


def plan_phases(phases: tuple[range, ...], problem_of: Callable[[range], Problem]) -> Iterator[PhasePlan]:
    """The best layout of each phase, and what that of the phases before takes: the layout changes where that pays."""
    layout: LayoutPlan | None = None
    for steps in phases:
        problem = problem_of(steps)
        macro = recipe_macro_batch(problem)
        problem, batches = certified(problem, macro)
        best = search(problem, shown=1, batches=batches).fastest
        kept = None if layout is None else _predicted(problem, layout, batches)
        plan = PhasePlan(steps, macro, best, kept, layout is None)
        if best is not None and (layout is None or plan.pays):
            layout = best.plan
        yield plan


def _predicted(problem: Problem, layout: LayoutPlan, batches: int) -> Prediction | None:
    try:
        found = Predictor(problem, batches, MIN_LANES).predict(layout)
    except HetmeshError:  # these data have no such batch
        return None
    return found if found.fits else None
