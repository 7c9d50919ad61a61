"""The `[balance]` of a recipe, with what its samples cost its modules."""

from __future__ import annotations

from collections.abc import Mapping

from hetmesh.balance import BalanceOptions
from hetmesh.balance.co_located import check_shares, leaders
from hetmesh.cost.flops import SampleCosts
from hetmesh.errors import GraphError, RecipeError
from hetmesh.graph import ModuleGraph
from hetmesh.recipe.sections import Balance
from hetmesh.resolve.modules import Shapes


def check_balance(keys: Balance, graph: ModuleGraph) -> None:
    """Raise RecipeError for caps and microbatches of modules that go along with another one."""
    led_by = leaders(graph)
    wrong = []
    for key in ("max_tokens", "microbatch_sizes", "microbatch_shares"):
        for name in getattr(keys, key):
            if (leader := led_by[name]) != name:
                instead = f"balance.{key}.{leader}"
                if key != "max_tokens" and leader == graph.sink.name:
                    instead = "it ranks or degrees of its own, or leave it out"
                wrong.append(
                    f"balance.{key}.{name}: it lies on the ranks of {leader!r} and takes the same samples; "
                    f"give {instead}"
                )
    for name, shares in keys.microbatch_shares.items():
        if led_by[name] == name:
            try:
                check_shares(graph, name, shares)
            except GraphError as error:
                wrong.append(f"balance.microbatch_shares.{name}: {error}")
    if wrong:
        raise RecipeError("\n".join(wrong))


def balance_options(keys: Balance, costs: Mapping[str, SampleCosts] | None) -> BalanceOptions:
    """How batches are balanced.

    Args:
        costs: what samples cost the modules; None where `balance.policy = "none"`, which has no use for most keys.
    """
    if costs is None:
        return BalanceOptions(microbatch_sizes=keys.microbatch_sizes, microbatch_shares=keys.microbatch_shares)
    return BalanceOptions(
        keys.policy,
        costs,
        keys.max_tokens,
        keys.microbatch_sizes,
        free=keys.microbatches == "free",
        deferral=keys.deferral,
        microbatch_shares=keys.microbatch_shares,
    )


def sample_costs(graph: ModuleGraph, shapes: Shapes) -> dict[str, SampleCosts]:
    """What samples cost each module, from its sizes."""
    return {
        name: SampleCosts.of(shapes[name], upstream=any(graph.needs_gradient(b) for b in graph.inputs(name)))
        for name in graph.order
    }
