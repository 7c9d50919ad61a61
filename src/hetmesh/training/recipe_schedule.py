"""The schedule that a recipe asks for, of each step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from hetmesh.balance import BatchPlan
from hetmesh.errors import HetmeshError, RecipeError, ScheduleError
from hetmesh.graph import ModuleGraph, Routes, StageGraph, stage_graph
from hetmesh.planner.fill_bubbles import fill_bubbles, fill_typical
from hetmesh.schedule import POLICIES, PolicyOptions, Schedule
from hetmesh.simulate import StepModel
from hetmesh.training.splits import TYPICAL
from hetmesh.training.step_model import TYPICAL_PEAK, agreed_step_model

if TYPE_CHECKING:
    from hetmesh.models import Adapter
    from hetmesh.recipe.recipe import Recipe


def recipe_schedule(recipe: Recipe, graph: ModuleGraph, routes: Routes | int, training: bool = True) -> Schedule:
    """The schedule that `recipe` asks for, of a step with the `routes` of its BatchPlan, or of so many microbatches in
    every module; `bubble_fill` with nominal durations.

    Raises:
        ScheduleError: a cap of the recipe is too low for these routes, with its key.
    """
    options = schedule_options(recipe)
    try:
        return POLICIES[recipe.schedule](cached_stage_graph(graph), routes, training, options)
    except ScheduleError as error:
        raise _with_key(options, error) from error


LONG = 1.0
"""Seconds from which on a step is worth a schedule of its own, some 50 ms of work on each rank beside the step before:
by 6 FLOPs per parameter and token of a full batch."""


KEPT = 64
"""Relations of microbatches whose schedules are kept: with deferral each step may have its own."""


class StepSchedules:
    """The schedules of a recipe's steps. Under `bubble_fill`, where the sizes of all modules are known, those of `LONG`
    steps follow what each microbatch costs; of shorter ones what typical microbatches do.

    Args:
        graph, adapters: from `hetmesh.training.describe`.
        model: what steps cost; None: `agreed_step_model`, so that all ranks find the same schedule.
    """

    def __init__(
        self, recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter], model: StepModel | None = None
    ) -> None:
        self.recipe, self.graph = recipe, graph
        self.model = (model or agreed_step_model(recipe, graph, adapters)) if recipe.fills_bubbles else None
        self._typical: dict[Routes, Schedule] = {}

    @cached_property
    def each_step(self) -> bool:
        """Whether every step has a schedule by its own costs."""
        assert self.model is not None
        parameters = sum(self.model.shape(name).parameters for name in self.graph.order)
        tokens = self.recipe.batch.global_batch_size * self.recipe.training.seq_len
        return 6 * parameters * tokens >= LONG * TYPICAL_PEAK * len(self.graph.ranks)

    def of(self, plan: BatchPlan, training: bool = True) -> Schedule:
        """The schedule of the step of `plan`.

        Raises:
            ScheduleError: see `recipe_schedule`.
        """
        if self.model is None or not training:
            return recipe_schedule(self.recipe, self.graph, plan.routes, training)
        options = schedule_options(self.recipe)
        try:
            if self.each_step:
                return fill_bubbles(self.model, plan, training, options)
            found = self._typical.pop(plan.routes, None)
            if found is None:
                found = fill_typical(self.model, plan.routes, training, options, TYPICAL)
            self._typical[plan.routes] = found  # behind all others: the first is that of longest ago
            if len(self._typical) > KEPT:
                del self._typical[next(iter(self._typical))]
            return found
        except ScheduleError as error:
            raise _with_key(options, error) from error


def check_schedule(recipe: Recipe, graph: ModuleGraph) -> None:
    """Raise RecipeError if the recipe's microbatches, as they are drawn, have no schedule."""
    if recipe.fills_bubbles:
        try:
            recipe_schedule(recipe, graph, recipe.batch.num_microbatches)
        except ScheduleError as error:
            raise RecipeError(str(error)) from error


def schedule_options(recipe: Recipe) -> PolicyOptions:
    """What the recipe asks of its policy."""
    return PolicyOptions(
        window=recipe.schedule_key("three_phase_window"),
        recompute=bool(recipe.schedule_key("three_phase_recompute")),
        offload=bool(recipe.schedule_key("three_phase_offload")),
        early=bool(recipe.schedule_key("interleaved_early_warmup")),
        inner=recipe.schedule_key("bubble_fill_schedule") or "1f1b",
        in_flight=recipe.schedule_key("bubble_fill_in_flight"),
    )


@lru_cache(maxsize=64)
def cached_stage_graph(graph: ModuleGraph) -> StageGraph:
    """`stage_graph`, once per graph: policies cache by it."""
    return stage_graph(graph)


def _with_key(options: PolicyOptions, error: ScheduleError) -> HetmeshError:
    key = "" if options.in_flight is None else f"parallelism.bubble_fill_in_flight = {options.in_flight}: "
    return ScheduleError(f"{key}{error}")
