"""The held-out samples of a recipe: the validation split of its data source, which `[validation]` may ask for."""

from __future__ import annotations

from hetmesh.data.loader import VALIDATION
from hetmesh.data.payloads import SplitSources
from hetmesh.data.registry import recipe_source
from hetmesh.data.source import Source
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe


def held_out_source(recipe: Recipe, sources: SplitSources | None = None) -> Source | None:
    """The validation split of the recipe's data source; None if it has none and `[validation]` does not ask for one,
    or if it is not enabled.

    Args:
        sources: the run's sources, if there are some already.

    Raises:
        RecipeError: `[validation]` has a freq or a number of samples, and the source has no validation split, an empty
            one, or one of fewer samples.
    """
    if not recipe.validation.enable:
        return None
    keys = recipe.validation
    given = {name: getattr(keys, name) for name in ("freq", "samples", "free_running")}
    key = next((f"validation.{name} = {value}" for name, value in given.items() if value), "")
    asked = bool(keys.freq) or keys.samples is not None or keys.free_running > 0
    try:
        if sources is not None:
            source = sources[VALIDATION]
        else:
            source = recipe_source(recipe.data, "validation")
    except RecipeError as error:
        if not asked:
            return None
        raise RecipeError(
            f"{key}: the data source has no validation split ({error}); give it one, or leave [validation] out"
        ) from error
    if len(source) == 0:
        if not asked:
            return None
        raise RecipeError(f"{key}: the validation split of {recipe.data.source!r} is empty")
    if keys.free_running > len(source):
        raise RecipeError(
            f"validation.free_running = {keys.free_running}: the validation split has {len(source)} samples; valid are "
            f"0 to {len(source)}"
        )
    if keys.samples is not None and keys.samples > len(source):
        raise RecipeError(
            f"validation.samples = {keys.samples}: the validation split has {len(source)}; valid are 1 to "
            f"{len(source)}, or leave it out to take them all"
        )
    return source
