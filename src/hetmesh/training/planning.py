"""Between a recipe and the planner: what it works on, and what a layout means in a recipe's keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetmesh.cost import load_machine
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.graph import Activation
from hetmesh.models import Adapter
from hetmesh.planner import DEGREE_KEYS, PLACEMENTS, LayoutPlan, ModuleFacts, Problem
from hetmesh.recipe.recipe import Recipe
from hetmesh.schedule import POLICIES
from hetmesh.training.balance import recipe_balance
from hetmesh.training.describe import describe, make_prepare
from hetmesh.training.step_model import recipe_step_model

BATCHES = 4
"""Global batches of samples that the planner sees."""

_WHOLE = {
    "placement": lambda value: value in PLACEMENTS,
    "schedule": lambda value: value in POLICIES,
    "microbatch_size": lambda value: isinstance(value, int) and value >= 1,
}
_CHECKPOINTS = ("none", "full")


def recipe_problem(
    recipe: Recipe,
    *,
    machine: str | None = None,
    ranks: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    memory_bytes: int | None = None,
) -> Problem:
    """What the planner searches for `recipe`; its own layout counts for nothing, its global batch size stays.

    Args:
        machine: a name or TOML file; None: `[metrics] machine`, else this CPU.
        ranks: None: those of the recipe.
        fixed: `"llm.tensor_parallel_degree"` -> 8 and the like; also `placement`, `schedule` and `microbatch_size`.

    Raises:
        RecipeError: what `hetmesh check` would find, or a key of `fixed` that there is not.
    """
    source, adapters, graph = describe(recipe)
    model = recipe_step_model(recipe, graph, adapters, machine=load_machine(machine) if machine else None)
    size = recipe.batch.global_batch_size
    loader = Loader(source, size, make_prepare(recipe, graph, adapters), seed=recipe.debug.seed)
    samples = loader.drawn([i for step in range(BATCHES) for i in loader.indices(step)]).metas
    facts = {name: _facts(recipe, name, adapters[name], model.shape(name), graph.sink.name) for name in graph.order}
    return Problem(
        graph,
        facts,
        model.machine,
        recipe.world_size if ranks is None else ranks,
        samples,
        size,
        recipe.optimizer.name,
        recipe_balance(recipe, graph, adapters),
        _fixed(fixed or {}, facts),
        memory_bytes,
    )


def _facts(recipe: Recipe, name: str, adapter: Adapter, shape: Any, sink: str) -> ModuleFacts:
    abilities, sizes = adapter.abilities, adapter.tensor_parallel_sizes().values()
    activation: Activation | None = abilities.activation
    return ModuleFacts(
        shape,
        activation,
        abilities.first_layers,
        math.gcd(*sizes),
        name == sink and abilities.use_packed is not None,
        recipe.wiring.tables[name] == name,
    )


def _fixed(given: Mapping[str, Any], facts: Mapping[str, ModuleFacts]) -> dict[tuple[str, str], object]:
    keys = [*DEGREE_KEYS.values(), "activation_checkpoint"]
    out: dict[tuple[str, str], object] = {}
    for key, value in given.items():
        module, dot, name = key.rpartition(".")
        own = [each for each, fact in facts.items() if fact.alone]
        if not dot and key in _WHOLE:
            valid = _WHOLE[key](value)
        elif module in own and name in keys:
            valid = value in _CHECKPOINTS if name == keys[-1] else isinstance(value, int) and value >= 1
        else:
            raise RecipeError(
                f"--fix {key}: valid are {', '.join(_WHOLE)}, and for MODULE of {own} MODULE.KEY with KEY of {keys}"
            )
        if not valid:
            raise RecipeError(f"--fix {key}: {value!r} is not valid")
        out[module, name] = value
    return out


def plan_keys(recipe: Recipe, plan: LayoutPlan, global_batch_size: int) -> dict[tuple[str, ...], Any]:
    """The recipe's keys that say `plan`; None: the key goes."""
    keys: dict[tuple[str, ...], Any] = {
        ("training", "global_batch_size"): global_batch_size,
        ("training", "local_batch_size"): plan.microbatch_size,
    }
    tables: dict[str, dict[str, Any]] = {}
    for name, own in plan.modules.items():
        table: dict[str, Any] = {"ranks": f"{own.ranks[0]}-{own.ranks[1] - 1}"}
        for axis, key in DEGREE_KEYS.items():
            if own.degree(axis) > 1 or (axis == "dp_replicate" and own.degree("dp_shard") == 1):
                table[key] = own.degree(axis)
        tables[name] = table
        keys["modules", name, "activation_checkpoint"] = own.activation_checkpoint
    keys["parallelism",] = {"pipeline_parallel_schedule": plan.schedule, **tables}
    return keys


def check_planned(text: str, plan: LayoutPlan) -> None:
    """Raise RecipeError unless the recipe `text` is valid and has the layout of `plan`."""
    from hetmesh.recipe.recipe import parse_recipe

    recipe = parse_recipe(text)
    _, _, graph = describe(recipe)
    for name, own in plan.modules.items():
        if graph[name].mesh != own.mesh:
            raise RecipeError(f"the recipe that was planned gives {name!r} the mesh {graph[name].mesh}, not {own.mesh}")
