"""Whether a recipe fits a machine's memory: the peak of every rank on the largest batch that the run could draw, found
before any machine is booked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetmesh.balance import BatchPlan, largest_batches, plan_batch
from hetmesh.boundary.groups import job_communicators
from hetmesh.graph import ModuleGraph
from hetmesh.resolve.balance_options import recipe_balance
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.simulate import MemoryFit, RankMemory, StepModel, rank_memory, worst

if TYPE_CHECKING:
    from hetmesh.data.loader import Loader
    from hetmesh.models import Adapter
    from hetmesh.recipe.recipe import Recipe

LOOKED_AT = 4096
"""Samples, evenly from all of the run, among which the largest are looked for; at least one global batch."""


def memory_fit(
    recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter], loader: Loader, model: StepModel
) -> MemoryFit:
    """What every rank holds at most, and whether `model.machine` has as much.

    The largest batch: of up to `LOOKED_AT` samples, from all of the run, those that give a module most rows, or the
    LLM most targets, together in one batch; of the batches by each measure the worst for each rank
    (`hetmesh.balance.largest_batches`).

    Args:
        graph, adapters: from `hetmesh.resolve.describe`.
        loader: of the recipe's training samples.

    Raises:
        RecipeError, SampleError: a balancer or a sample refuses the batch.
    """
    size, steps = recipe.batch.global_batch_size, recipe.training.steps
    wanted = min(max(LOOKED_AT // size, 1), steps)
    samples = loader.drawn([i for k in range(wanted) for i in loader.indices(k * steps // wanted)]).metas
    schedules, balance = StepSchedules(recipe, graph, adapters), recipe_balance(recipe, graph, adapters)
    plans = (
        plan_batch(graph, batch, recipe.batch.microbatch_size, balance)
        for batch in largest_batches(graph, samples, size)
    )
    ranks = worst(step_memory(recipe, model, plan, schedules) for plan in plans)
    return MemoryFit(model.machine.name, model.machine.memory_bytes, ranks, len(samples), steps * size)


def step_memory(recipe: Recipe, model: StepModel, plan: BatchPlan, schedules: StepSchedules) -> dict[int, RankMemory]:
    """Per rank what it holds at most in the step of one `plan`: what a dry run or a real one of that step measures."""
    schedule = schedules.of(plan)
    return rank_memory(model, schedule, model.costs(plan, schedule), communicators(recipe, model))


def communicators(recipe: Recipe, model: StepModel) -> dict[int, int]:
    """How many communicators each rank uses."""
    return job_communicators(model.graph, recipe.world_size, lambda spec: model.shape(spec.name))
