"""The simulated step of a recipe: its first global batch under its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from hetmesh.balance import plan_batch
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.balance_options import recipe_balance
from hetmesh.resolve.describe import describe, make_loader
from hetmesh.resolve.recipe_step_model import named_step_model
from hetmesh.resolve.schedules import StepSchedules, schedule_options
from hetmesh.simulate import Timeline, simulate
from hetmesh.simulate.fill_bubbles import fill_bubbles


def simulate_recipe(
    recipe: Recipe, *, machine: str | None = None, profile: str | None = None, beside: Sequence[str] = ()
) -> Timeline:
    """Simulate the first step of `recipe`: one process, no process group, no weights.

    Args:
        machine: a name or TOML file; None: `[metrics] machine`, else this CPU.
        profile: a file of `hetmesh profile`; None: `[profiling] profile`, and without one the analytic costs.
        beside: modules whose kernels run in the collectives of others (`hetmesh.simulate.beside`), which no training
            does yet.

    Raises:
        RecipeError: what `hetmesh check` would find, or sizes of a module or a machine that are not known.
    """
    if wrong := [name for name in beside if name not in recipe.modules or name == recipe.sink]:
        valid = ", ".join(name for name in recipe.modules if name != recipe.sink)
        raise RecipeError(f"beside = {wrong[0]!r}: only modules before {recipe.sink!r} can run beside it: {valid}")
    source, adapters, graph = describe(recipe)
    drawn = make_loader(recipe, source, graph, adapters).batch(0)
    balance = recipe_balance(recipe, graph, adapters)
    plan = plan_batch(graph, drawn.metas, recipe.batch.microbatch_size, balance)
    model = named_step_model(recipe, graph, adapters, machine, profile)
    if beside and recipe.fills_bubbles:
        schedule = fill_bubbles(model, plan, True, schedule_options(recipe), beside=beside)
    else:
        schedule = StepSchedules(recipe, graph, adapters, model if machine or profile else None).of(plan)
    return simulate(schedule, model.costs(plan, schedule, parts=bool(beside)), beside=beside)
