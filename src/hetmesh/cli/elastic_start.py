"""A start of an elastic run: rank 0 chooses the layout for the ranks that there are, and all of them take it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from hetmesh.boundary.meeting import from_first_rank
from hetmesh.checkpoint.saved_run import run_recipe
from hetmesh.errors import RecipeError
from hetmesh.files import from_json, read_text, writing
from hetmesh.formatting import counted
from hetmesh.planner import search
from hetmesh.recipe.recipe import Recipe, load_recipe, place_beside
from hetmesh.recipe.sections import freeze
from hetmesh.records.dump_folder import resumable, steps_after
from hetmesh.report.plan_text import nothing_found
from hetmesh.resolve.elastic import (
    NamedLayout,
    PredictedLayout,
    fastest,
    last_layout,
    layout_line,
    layouts_for,
    other_run,
    run_layouts,
    same_layout,
)
from hetmesh.resolve.planning import certified, planned_text, recipe_macro_batch, recipe_problem
from hetmesh.resolve.recipe_step_model import agreed_step_model
from hetmesh.resolve.resolved import resolve


def agreed_recipe(path: Path, recipe: Recipe, overrides: Sequence[str], ranks: int) -> Recipe | None:
    """`recipe` in the layout that rank 0 has chosen for `ranks`, and says in a line; None on the other ranks where rank
    0 has raised. Collective, before there is a process group.

    Raises:
        RecipeError: on rank 0: `[elastic]` names what is no layout of the run, or none has those ranks; on all:
            torchrun's agents cannot come and go as they were started.
        LaunchError: a rank cannot be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise RecipeError(
            "elastic: torchrun's agents keep the address of the store that the first one has shared, so none may come "
            "or go; start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, on all machines"
        )

    def decide() -> str:
        chosen, line = choose(path, recipe, overrides, ranks)
        if line:
            print(line, flush=True)
        return chosen.model_dump_json(by_alias=True, exclude_defaults=True)

    found = from_first_rank(decide, timedelta(seconds=recipe.comm.init_timeout_seconds))
    if not found:
        return None
    agreed = Recipe.model_validate(freeze(from_json(found)))
    place_beside(agreed, recipe.code_folder)
    return agreed


def choose(path: Path, recipe: Recipe, overrides: Sequence[str], ranks: int) -> tuple[Recipe, str]:
    """The recipe of the fastest layout of `ranks`, and the line that says what has changed; see `agreed_recipe`."""
    layouts, planned = run_layouts(path, recipe, overrides), _planned_before(recipe, ranks)
    try:
        found = layouts_for([*layouts, *planned], ranks)
    except RecipeError as error:
        if not recipe.elastic.plan:
            raise
        found = [_planned(path, recipe, overrides, ranks, str(error))]
    now = fastest(list(map(PredictedLayout.of, found))).layout if len(found) > 1 else found[0]
    run = resumable(recipe)
    try:
        last = None if run is None else run_recipe(run.path)
    except RecipeError:  # of another version, say; resuming compares the checkpoint's own
        last = None
    if run is None or last is None:
        return now.recipe, layout_line(PredictedLayout.of(now))
    if same_layout(now.recipe, last):
        return now.recipe, ""
    before = last_layout([*layouts, *_planned_before(recipe, last.world_size)], last)
    return now.recipe, layout_line(
        PredictedLayout.of(now), PredictedLayout.of(before), run.step, steps_after(run.path, run.step)
    )


def _plan_file(recipe: Recipe, ranks: int) -> Path:
    return Path(recipe.job.dump_folder) / f"layout-{ranks}.toml"


def _planned_before(recipe: Recipe, ranks: int) -> list[NamedLayout]:
    """The layout that the planner found for this run on `ranks`, if it has searched for one."""
    file = _plan_file(recipe, ranks)
    if not recipe.elastic.plan or not file.exists():
        return []
    try:
        found = load_recipe(file)
    except RecipeError:
        return []  # of another version, say: it is found anew
    place_beside(found, recipe.code_folder)
    found = found.model_copy(update={"elastic": recipe.elastic})
    return [] if other_run(recipe, found) or found.world_size != ranks else [NamedLayout(str(file), found)]


def _planned(path: Path, recipe: Recipe, overrides: Sequence[str], ranks: int, otherwise: str) -> NamedLayout:
    """The layout that the planner finds for `ranks`, which it also writes into the dump folder, as it takes a while.
    Raises RecipeError: it finds none, and `otherwise`."""
    print(f"elastic: planning a layout of {counted(ranks, 'rank')}", flush=True)
    resolved = resolve(recipe)
    model, problem = agreed_step_model(recipe, resolved.graph, resolved.shapes), recipe_problem(resolved, ranks=ranks)
    problem = replace(problem, machine=model.machine) if model else problem  # which measures nothing
    problem, batches = certified(problem, recipe_macro_batch(problem))
    found = search(problem, shown=1, batches=batches)
    if found.fastest is None:
        raise RecipeError(f"{otherwise}, which finds nothing here: {nothing_found(problem, found)}")
    text = planned_text(recipe, read_text(path), overrides, problem, found.fastest.plan)
    file = _plan_file(recipe, ranks)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    (layout,) = _planned_before(recipe, ranks)
    return layout
