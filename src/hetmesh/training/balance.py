"""The `[balance]` of a recipe, with what its samples cost its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetmesh.balance import BalanceOptions
from hetmesh.balance.leaders import leaders
from hetmesh.cost.sample_costs import SampleCosts
from hetmesh.errors import RecipeError
from hetmesh.graph import ModuleGraph
from hetmesh.training.module_shapes import module_shapes

if TYPE_CHECKING:
    from hetmesh.models import Adapter
    from hetmesh.recipe.recipe import Recipe


def recipe_balance(recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> BalanceOptions:
    """How the batches of a recipe are balanced.

    Args:
        graph, adapters: from `hetmesh.training.describe`.

    Raises:
        RecipeError: a cap of a module that goes along with another one.
    """
    keys, led_by = recipe.balance, leaders(graph)
    for name in keys.max_tokens:
        if led_by[name] != name:
            raise RecipeError(
                f"balance.max_tokens.{name}: it lies on the ranks of {led_by[name]!r} and takes the same samples; give "
                f"balance.max_tokens.{led_by[name]}"
            )
    if keys.policy == "none":
        return BalanceOptions()
    shapes = module_shapes(recipe, adapters)
    costs = {
        name: SampleCosts.of(shapes[name], upstream=any(graph.needs_gradient(b) for b in graph.inputs(name)))
        for name in graph.order
    }
    return BalanceOptions(keys.policy, costs, keys.max_tokens, free=keys.microbatches == "free", deferral=keys.deferral)
