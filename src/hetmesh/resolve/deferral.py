"""Whether a run defers (Entrain): decided once, before its first step, by simulated steps of some of its batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetmesh.balance import DEFERRING, BalanceOptions, BatchPlan, largest_batches, plan_batch
from hetmesh.balance.co_located import led_modules
from hetmesh.boundary.process_groups import job_communicators
from hetmesh.cost import StepCosts
from hetmesh.data.loader import Loader
from hetmesh.errors import HetmeshError
from hetmesh.formatting import counted
from hetmesh.graph import MetaArrays, ModuleGraph
from hetmesh.planner.predict import MIN_LANES, some_lanes
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.metrics import amount
from hetmesh.resolve.modules import Shapes
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.schedule import Schedule
from hetmesh.simulate import MemoryFit, largest_memory, rank_memory, simulate

BATCHES = 4
"""Global batches, evenly from all of the run, that are simulated with deferral and without."""

MIN_GAIN = 0.01
"""Part of the step that it must save: rows wait for longer, and encoders warm up with one more forward."""


@dataclass(frozen=True)
class DeferralChoice:
    """Whether the LLM may take samples a microbatch late, why, and the share of steps saved (None: not compared)."""

    on: bool
    reason: str
    saved: float | None = None

    def __str__(self) -> str:
        return f"{'on' if self.on else 'off'}: {self.reason}"


def choose_deferral(
    recipe: Recipe, graph: ModuleGraph, shapes: Shapes, loader: Loader, balance: BalanceOptions
) -> DeferralChoice:
    """What `[balance] deferral` says, and for `"auto"` whether simulated steps are shorter with it and memory suffices.

    Equal on every rank: nothing is measured, and metadata decide. Of large jobs some lanes are simulated.

    Args:
        loader: of the training samples, at their beginning.
        balance: how batches are balanced without deferral.

    Raises:
        RecipeError: the machine or the profile of the recipe cannot be read.
    """
    keys = recipe.balance
    if keys.deferral != "auto":
        return DeferralChoice(keys.deferral, "as balance.deferral says")
    if keys.policy not in DEFERRING:
        return DeferralChoice(False, f"balance.policy = {keys.policy!r} defers nothing")
    if len(led_modules(graph)) < 2 or recipe.batch.num_microbatches < 2:
        return DeferralChoice(False, "it takes an encoder balanced apart from the LLM, and two microbatches or more")
    some, share = some_lanes(graph, MIN_LANES)
    model = agreed_step_model(recipe, some, shapes)
    if model is None:
        return DeferralChoice(False, "the sizes of a module are not known, and so not what it saves")
    schedules = StepSchedules(recipe, some, model)

    def planned(samples: MetaArrays, deferral: bool) -> tuple[BatchPlan, Schedule, StepCosts]:
        plan = plan_batch(some, samples, recipe.batch.microbatch_size, replace(balance, deferral=deferral))
        schedule = schedules.of(plan)
        return plan, schedule, model.costs(plan, schedule)

    size, steps = recipe.batch.global_batch_size, recipe.training.steps
    count, part = min(BATCHES, steps), max(round(size * share), 1)
    try:
        samples = loader.drawn([i for k in range(count) for i in loader.indices(k * steps // count)]).metas
        batches = [samples.take(np.arange(k * size, k * size + part)) for k in range(count)]
        plain, late = ([planned(batch, deferral) for batch in batches] for deferral in (False, True))
        if all(one.lanes == other.lanes for (one, _, _), (other, _, _) in zip(plain, late, strict=True)):
            return DeferralChoice(False, "the balancer defers nothing in sampled batches", 0.0)
        before, after = (sum(simulate(schedule, cost).makespan for _, schedule, cost in each) for each in (plain, late))
        saved = 1 - after / before
        said = f"in simulated steps of {counted(count, 'batch', 'batches')} it saves {saved:.1%} of the time"
        if saved < MIN_GAIN:
            return DeferralChoice(False, f"{said}, less than {MIN_GAIN:.0%}", saved)
        late += [planned(largest, True) for largest in largest_batches(some, samples, part)]
    except HetmeshError as error:  # which ends the run when it comes to that batch
        return DeferralChoice(False, f"a sampled batch cannot be laid out: {error}")
    communicators = job_communicators(graph, recipe.world_size, lambda spec: shapes[spec.name])
    ranks = largest_memory(rank_memory(model, schedule, cost, communicators) for _, schedule, cost in late)
    fit = MemoryFit(model.machine.name, model.machine.memory_bytes, ranks)
    if fit.fits is False:
        held = f"{amount(fit.peak_bytes)}B of {amount(fit.memory_bytes)}B"
        return DeferralChoice(False, f"{said}, but rank {fit.fullest} would hold {held}", saved)
    return DeferralChoice(True, said, saved)
