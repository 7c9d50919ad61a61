"""Which ranks a dry run takes, and what the simulator predicts for them."""

from __future__ import annotations

import numpy as np

from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.cost import Machine, load_machine
from hetmesh.dryrun.dry_run import dry_run, with_microbatches
from hetmesh.dryrun.dry_run_values import DryRuns, RankGroup
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.balance_options import recipe_balance
from hetmesh.resolve.describe import describe, make_loader
from hetmesh.resolve.memory_fit import step_memory
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.schedules import StepSchedules
from hetmesh.simulate import RankMemory, simulate

MACHINE = "h100"
"""Whose memory counts where neither the command nor the recipe names a machine."""


def dry_runs(
    recipe: Recipe, rank: int | None = 0, *, machine: str | None = None, microbatches: int | None = None
) -> DryRuns:
    """Run one step of `rank`, or of one rank of each group of equal ones.

    Args:
        rank: None: all ranks.
        machine: a name or TOML file; None: `[metrics] machine`, else `MACHINE`.
        microbatches: see `dry_run`.

    Raises:
        RecipeError: what `hetmesh check` would find; no such rank, machine or number of microbatches.
        RuntimeError: a module decides shapes by values that only the device could compute.
    """
    if rank is not None and not 0 <= rank < recipe.world_size:
        raise RecipeError(f"--rank {rank}: the recipe has ranks 0-{recipe.world_size - 1}, or all")
    found = load_machine(machine or recipe.metrics.machine or MACHINE)
    recipe = with_microbatches(recipe, microbatches)
    groups = []
    for ranks, fullest, memory in _groups(recipe, found):
        if rank is None or rank in ranks:
            taken = fullest if rank is None else rank
            groups.append(RankGroup(ranks, dry_run(recipe, taken), memory[taken]))
    return DryRuns(tuple(groups), found.name, found.memory_bytes)


def fullest_group(recipe: Recipe, machine: str | None = None, *, draws: bool = False) -> RankGroup:
    """Of all groups of equal ranks the one that is predicted to hold most, run; `draws` as in `dry_run`."""
    found = load_machine(machine or recipe.metrics.machine or MACHINE)
    ranks, fullest, memory = max(_groups(recipe, found), key=lambda group: group[2][group[1]].tensors)
    return RankGroup(ranks, dry_run(recipe, fullest, draws=draws), memory[fullest])


def _groups(recipe: Recipe, machine: Machine) -> list[tuple[tuple[int, ...], int, dict[int, RankMemory]]]:
    """Ranks that hold the same stages; of them the one with most to do in the first global batch; and the predicted
    memory of all ranks."""
    source, adapters, graph = describe(recipe)
    drawn = make_loader(recipe, source, graph, adapters).batch(0)
    plan = plan_batch(graph, drawn.metas, recipe.batch.microbatch_size, recipe_balance(recipe, graph, adapters))
    model = recipe_step_model(recipe, graph, adapters, machine=machine)
    schedules = StepSchedules(recipe, graph, adapters)
    memory = step_memory(recipe, model, plan, schedules)
    tracks = simulate(schedules.of(plan), model.costs(plan, schedules.of(plan))).tracks
    return [(ranks, max(ranks, key=lambda rank: (_load(plan, rank), -rank)), memory) for ranks in tracks]


def _load(plan: BatchPlan, rank: int) -> tuple[int, ...]:
    """What the lanes of a rank have to do: targets, then rows, of the largest microbatch of each module."""
    most = np.zeros(3, np.int64)
    for name in plan.graph.order:
        lane = plan.graph[name].lane_of(rank)
        if lane is not None:
            most += plan.lane_work(name)[:, lane].max(0)
    rows, pairs, targets = most.tolist()
    return targets, rows, pairs
