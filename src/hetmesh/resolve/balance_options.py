"""The `[balance]` of a recipe, with what its samples cost its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetmesh.balance import BalanceOptions
from hetmesh.balance.co_located import check_shares, leaders
from hetmesh.cost import ModuleShape
from hetmesh.cost.flops import SampleCosts
from hetmesh.errors import GraphError, RecipeError
from hetmesh.graph import ModuleGraph
from hetmesh.resolve.module_shapes import module_shapes

if TYPE_CHECKING:
    from hetmesh.models import Adapter
    from hetmesh.recipe.recipe import Recipe


def check_balance(recipe: Recipe, graph: ModuleGraph) -> None:
    """Raise RecipeError for caps and microbatches of modules that go along with another one."""
    led_by = leaders(graph)
    wrong = []
    for key in ("max_tokens", "microbatch_sizes", "microbatch_shares"):
        for name in getattr(recipe.balance, key):
            if (leader := led_by[name]) != name:
                instead = f"balance.{key}.{leader}"
                if key != "max_tokens" and leader == graph.sink.name:
                    instead = "it ranks or degrees of its own, or leave it out"
                wrong.append(
                    f"balance.{key}.{name}: it lies on the ranks of {leader!r} and takes the same samples; "
                    f"give {instead}"
                )
    for name, shares in recipe.balance.microbatch_shares.items():
        if led_by[name] == name:
            try:
                check_shares(graph, name, shares)
            except GraphError as error:
                wrong.append(f"balance.microbatch_shares.{name}: {error}")
    if wrong:
        raise RecipeError("\n".join(wrong))


def recipe_balance(recipe: Recipe, graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> BalanceOptions:
    """How the batches of a recipe are balanced.

    Args:
        graph, adapters: from `hetmesh.resolve.describe`, which has checked the keys.
    """
    keys = recipe.balance
    if keys.policy == "none":
        return BalanceOptions(microbatch_sizes=keys.microbatch_sizes, microbatch_shares=keys.microbatch_shares)
    costs = sample_costs(graph, module_shapes(recipe, adapters))
    return BalanceOptions(
        keys.policy,
        costs,
        keys.max_tokens,
        keys.microbatch_sizes,
        free=keys.microbatches == "free",
        deferral=keys.deferral,
        microbatch_shares=keys.microbatch_shares,
    )


def sample_costs(graph: ModuleGraph, shapes: Mapping[str, ModuleShape | None]) -> dict[str, SampleCosts]:
    """What samples cost each module, from its sizes."""
    return {
        name: SampleCosts.of(shapes[name], upstream=any(graph.needs_gradient(b) for b in graph.inputs(name)))
        for name in graph.order
    }
