"""Where a recipe's samples are loaded."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from hetmesh.data.loader import TRAIN, VALIDATION
from hetmesh.data.payloads import Direct, Payloads, SplitSources
from hetmesh.data.registry import recipe_source
from hetmesh.data.workers import InWorkers
from hetmesh.errors import RecipeError

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

PATIENCE = 0.8
"""Share of the time that ranks wait for each other after which a sample counts as hanging: the rank that waits for the
sample shall say so before the others say that they wait for the rank."""


def open_payloads(recipe: Recipe) -> Payloads:
    """Where the samples of `recipe` are loaded; worker processes start here, so call it before anything has a thread.

    Raises:
        RecipeError: the data source cannot be made.
    """
    keys = recipe.data
    sources = SplitSources(
        {TRAIN: partial(recipe_source, keys), VALIDATION: partial(recipe_source, keys, "validation")}
    )
    if not keys.num_workers:
        return Direct(sources)
    sources[TRAIN]  # made now, forked workers share them
    with contextlib.suppress(RecipeError):  # there may be none
        sources[VALIDATION]
    return InWorkers(sources, keys.num_workers, keys.prefetch_factor, PATIENCE * recipe.comm.train_timeout_seconds)
