"""The schedule that a recipe asks for, of each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache

from hetmesh.balance import BalanceOptions, BatchPlan, plan_batch
from hetmesh.cost.machine import TYPICAL_PEAK
from hetmesh.errors import RecipeError, ScheduleError
from hetmesh.formatting import counted
from hetmesh.graph import ModuleGraph, Routes, SampleMeta, StageGraph, stage_graph
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.splits import TYPICAL, Typical
from hetmesh.schedule import POLICIES, PolicyOptions, Schedule, uses_collectives
from hetmesh.simulate import StepModel
from hetmesh.simulate.fill_bubbles import fill_bubbles, fill_typical, fill_typical_beside


def recipe_schedule(recipe: Recipe, graph: ModuleGraph, routes: Routes | int, training: bool = True) -> Schedule:
    """The schedule that `recipe` asks for, of a step with the `routes` of its BatchPlan, or of that number of
    microbatches in every module; `bubble_fill` with nominal durations, and with `bubble_fill_in_flight` raised where
    these routes need more."""
    return POLICIES[recipe.schedule](cached_stage_graph(graph), routes, training, schedule_options(recipe))


LONG_STEP_S = 1.0
"""Seconds from which on a step is worth a schedule of its own, some 50 ms of work on each rank beside the step before:
by 6 FLOPs per parameter and token of a full batch."""

MAX_TYPICAL = 64
"""Relations of microbatches whose schedules are kept: with deferral each step may have another one."""


class StepSchedules:
    """The schedules of a recipe's steps. Under `bubble_fill`, where the sizes of all modules are known, those of long
    steps follow what each microbatch costs; of shorter ones what typical microbatches do. `model`: what steps cost;
    None where the sizes of a module are not known; `typical`: what microbatches give modules."""

    def __init__(
        self, recipe: Recipe, graph: ModuleGraph, model: StepModel | None, typical: Typical | None = None
    ) -> None:
        self.recipe, self.graph, self.typical = recipe, graph, typical or Typical()
        self.model = model if recipe.fills_bubbles else None
        self._typical: dict[Routes, Schedule] = {}
        self._newest: tuple[BatchPlan, Schedule] | None = None  # of steps that have their own

    @cached_property
    def each_step(self) -> bool:
        """Whether every step has a schedule by its own costs."""
        assert self.model is not None
        parameters = sum(self.model.shape(name).parameters for name in self.graph.order)
        tokens = self.recipe.batch.global_batch_size * self.recipe.training.seq_len
        return 6 * parameters * tokens >= LONG_STEP_S * TYPICAL_PEAK * len(self.graph.ranks)

    def of(self, plan: BatchPlan, training: bool = True) -> Schedule:
        """The schedule of the step of `plan`."""
        if self.model is None or not training:
            return recipe_schedule(self.recipe, self.graph, plan.routes, training)
        options = schedule_options(self.recipe)
        beside = [name for name in self.graph.order if name != self.graph.llm.name] if options.in_collectives else ()
        if self.each_step:
            if self._newest is None or self._newest[0] is not plan:  # several ask for one plan's, which takes seconds
                self._newest = plan, fill_bubbles(self.model, plan, training, options, beside=beside)
            return self._newest[1]
        found = self._typical.pop(plan.routes, None)
        if found is None and beside:
            found = fill_typical_beside(self.model, plan.routes, options, self.typical.of, beside)
        elif found is None:
            found = fill_typical(self.model, plan.routes, training, options, TYPICAL)
        self._typical[plan.routes] = found  # last: the first is that of longest ago
        if len(self._typical) > MAX_TYPICAL:
            del self._typical[next(iter(self._typical))]
        return found


def over_in_flight(recipe: Recipe, schedule: Schedule) -> int:
    """Microbatches beyond `bubble_fill_in_flight` that a stage of an encoder may hold in `schedule`, since the order of
    the LLM needs them; 0 where the recipe has no such key."""
    cap, llm = recipe.schedule_key("bubble_fill_in_flight"), schedule.stages.llm.module
    held = [most for stage, most in schedule.in_flight.items() if stage.module != llm]
    return 0 if cap is None else max([0, *(most - cap for most in held)])


def check_schedule(recipe: Recipe, graph: ModuleGraph) -> None:
    """Raise RecipeError if microbatches of the sizes that the recipe gives have no schedule under bubble_fill where
    samples are all alike. A step may have other routes, by deferral or a free number: there the cap gives way."""
    if not recipe.fills_bubbles:
        return
    try:
        _of_alike(recipe, graph)
    except ScheduleError as error:
        cap, where = recipe.schedule_key("bubble_fill_in_flight"), recipe.schedule_place("bubble_fill_in_flight")
        key = "" if cap is None else f"{where} = {cap}: "
        raise RecipeError(f"{key}{error}") from error


def idle_in_collectives(recipe: Recipe, graph: ModuleGraph) -> Iterator[str]:
    """Where encoders shall run in the LLM's collectives and have nothing to do meanwhile, with the reasons, if
    microbatches have the sizes that the recipe gives."""
    key, cap = "bubble_fill_in_collectives", recipe.schedule_key("bubble_fill_in_flight")
    if not recipe.fills_bubbles or not recipe.schedule_key(key) or recipe.balance.microbatches == "free":
        return
    if not uses_collectives(_of_alike(recipe, graph)):
        given, wanted = counted(recipe.batch.num_microbatches, "microbatch", "microbatches"), "smaller microbatches"
        if cap is not None:
            given, wanted = f"{given} and bubble_fill_in_flight = {cap}", f"{wanted} or a higher cap"
        yield (
            f"{recipe.schedule_place(key)} = True: with {given} there is nothing that encoders could run while "
            f"{recipe.llm!r} computes; take {wanted}, or leave the key out"
        )


def _of_alike(recipe: Recipe, graph: ModuleGraph) -> Schedule:
    """The schedule where samples are all alike. Raises ScheduleError: no such schedule keeps the cap."""
    keys, size = recipe.balance, recipe.batch.global_batch_size
    routes: Routes | int = recipe.batch.num_microbatches
    if keys.microbatch_sizes or keys.microbatch_shares:
        samples = [SampleMeta(str(i), 1, rows=dict.fromkeys(graph.order, 1)) for i in range(size)]
        balance = BalanceOptions(
            keys.policy, microbatch_sizes=keys.microbatch_sizes, microbatch_shares=keys.microbatch_shares
        )
        routes = plan_batch(graph, samples, recipe.batch.microbatch_size, balance).routes
    options = replace(schedule_options(recipe), raise_in_flight=False)
    return POLICIES[recipe.schedule](cached_stage_graph(graph), routes, True, options)


def schedule_options(recipe: Recipe) -> PolicyOptions:
    """What the recipe asks of its policy."""
    return PolicyOptions(
        window=recipe.schedule_key("three_phase_window"),
        recompute=bool(recipe.schedule_key("three_phase_recompute")),
        offload=bool(recipe.schedule_key("three_phase_offload")),
        early=bool(recipe.schedule_key("interleaved_early_warmup")),
        inner=recipe.schedule_key("bubble_fill_schedule") or "1f1b",
        in_flight=recipe.schedule_key("bubble_fill_in_flight"),
        raise_in_flight=True,
        in_collectives=bool(recipe.schedule_key("bubble_fill_in_collectives")),
    )


@lru_cache(maxsize=64)
def cached_stage_graph(graph: ModuleGraph) -> StageGraph:
    """`stage_graph`, once per graph: policies cache by it."""
    return stage_graph(graph)
