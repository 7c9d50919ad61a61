"""Users' tensor parallel plans, compared with the whole module before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetmesh.errors import Refusals
from hetmesh.models import Adapter
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.models.user.plan_probe import reason_not_compared

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

_compared: dict[Any, str | None] = {}
"""What was compared in this process, as several commands and the job ask again -> why it could not be."""


def uncompared_plans(recipe: Recipe, adapters: Mapping[str, Adapter], vocab_size: int) -> list[str]:
    """Compare modules whose plan is a user's with themselves on tensor parallel ranks.

    Returns:
        What could not be compared or tried, and why, a sentence each.

    Raises:
        RecipeError: one computes something else, a line each.
    """
    notes, refusals = list[str](), Refusals()
    for name, adapter in adapters.items():
        if isinstance(adapter, UserAdapter) and adapter.reason_not_probed:
            notes.append(f"modules.{name}: whether it mixes samples was not tried: {adapter.reason_not_probed}")
        if adapter.abilities.gathered_whole and recipe.wiring.meshes[name].axis_size("fsdp") > 1:
            notes.append(f"modules.{name}: FSDP gathers it whole: not every call is known to enter each layer once")
        degree, added = recipe.wiring.meshes[name].axis_size("tp"), recipe.modules[name].plan
        plan = {**adapter.tensor_parallel_plan(), **added}
        if degree == 1 or not plan or (":" not in recipe.modules[name].model and not added):
            continue
        where = f"modules.{name}.plan" if added else f"modules.{name}: its tensor_parallel_plan"
        key = (repr(adapter), repr(plan), degree, vocab_size)
        with refusals.collect():
            if key not in _compared:
                _compared[key] = reason_not_compared(adapter, plan, degree, vocab_size, where)
            if _compared[key] is not None:
                notes.append(f"{where} was not compared with the whole module: {_compared[key]}")
    refusals.finish()
    return notes
