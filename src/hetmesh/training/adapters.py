"""The adapters and the data source that a recipe names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetmesh.training.recipe import Recipe
from hetmesh.training.recipe_sections import thaw

if TYPE_CHECKING:
    from hetmesh.data.source import Source
    from hetmesh.models import Adapter


def recipe_source(recipe: Recipe) -> Source:
    """The training samples: `[data] source` with its `options`.

    Raises:
        RecipeError: there is no such source, or it does not take these options.
    """
    from hetmesh.data.source import make_source

    return make_source(recipe.data.source, **thaw(recipe.data.options))


def recipe_adapters(recipe: Recipe, source: Source) -> dict[str, Adapter]:
    """One adapter per module, in the recipe's order; the vocabulary is the source's.

    Raises:
        RecipeError: an unknown model or config key, or widths that do not fit across a boundary.
    """
    from hetmesh.models import make_adapters

    # libraries that read a config table may also write into it
    modules = {name: m.model_copy(update={"config": thaw(m.config)}) for name, m in recipe.modules.items()}
    return make_adapters(modules, recipe.boundaries, source.vocab_size, getattr(source, "media_shapes", None))
