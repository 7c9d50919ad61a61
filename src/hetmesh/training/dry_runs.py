"""Which ranks a dry run takes, and what the simulator predicts for them."""

from __future__ import annotations

import numpy as np

from hetmesh.balance import BatchPlan, plan_batch
from hetmesh.cost import Machine, lane_work, load_machine
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.simulate import simulate
from hetmesh.training.balance import recipe_balance
from hetmesh.training.describe import describe, make_loader
from hetmesh.training.dry_run import dry_run, with_microbatches
from hetmesh.training.dry_run_values import DryRuns, RankGroup
from hetmesh.training.recipe_schedule import StepSchedules
from hetmesh.training.step_model import named_step_model

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
    for ranks, fullest, predicted in _groups(recipe, found):
        if rank is None or rank in ranks:
            run = dry_run(recipe, fullest if rank is None else rank)
            groups.append(RankGroup(ranks, run, predicted))
    return DryRuns(tuple(groups), found.name, found.memory_bytes)


def fullest_group(recipe: Recipe, machine: str | None = None) -> RankGroup:
    """Of all groups of equal ranks the one that is predicted to hold most, run."""
    found = load_machine(machine or recipe.metrics.machine or MACHINE)
    ranks, fullest, predicted = max(_groups(recipe, found), key=lambda group: group[2])
    return RankGroup(ranks, dry_run(recipe, fullest), predicted)


def _groups(recipe: Recipe, machine: Machine) -> list[tuple[tuple[int, ...], int, int]]:
    """Ranks that hold the same stages; of them the one with most to do in the first global batch; and the predicted
    peak."""
    source, adapters, graph = describe(recipe)
    drawn = make_loader(recipe, source, graph, adapters).batch(0)
    plan = plan_batch(graph, drawn.metas, recipe.batch.microbatch_size, recipe_balance(recipe, graph, adapters))
    model = named_step_model(recipe, graph, adapters, machine.name, None)
    schedule = StepSchedules(recipe, graph, adapters).of(plan)
    timeline = simulate(schedule, model.costs(plan, schedule))
    return [
        (ranks, max(ranks, key=lambda rank: (_load(plan, rank), -rank)), peak)
        for ranks, peak in zip(timeline.tracks, timeline.peak_bytes, strict=True)
    ]


def _load(plan: BatchPlan, rank: int) -> tuple[int, ...]:
    """What the lanes of a rank have to do: targets, then rows, of the largest microbatch of each module."""
    most = np.zeros(3, np.int64)
    for name in plan.graph.order:
        lane = plan.graph[name].lane_of(rank)
        if lane is not None:
            most += lane_work(plan, name)[:, lane].max(0)
    rows, pairs, targets = most.tolist()
    return targets, rows, pairs
