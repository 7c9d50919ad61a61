"""The directory of a whole multimodal model from which the modules of a recipe come, if all come from one."""

from __future__ import annotations

from hetmesh.models import pretrained_of
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.recipe.hf_families import class_of
from hetmesh.recipe.recipe import Recipe


def directory_of(recipe: Recipe) -> Pretrained | None:
    """The one directory of a whole multimodal model from which all modules of `recipe` come, None if there is none."""
    found = {name: pretrained_of(name, module) for name, module in recipe.modules.items()}
    paths = {None if each is None else each.path.resolve() for each in found.values()}
    pretrained = found[recipe.sink]
    return pretrained if len(paths) == 1 and len(found) > 1 and _is_whole(pretrained) else None


def why_not_compared(recipe: Recipe) -> str:
    """Why modules of a whole multimodal model's directory are not compared with it; empty where they are, or where none
    of them comes from such a directory."""
    found = {name: pretrained_of(name, module) for name, module in recipe.modules.items()}
    if directory_of(recipe) is not None or not any(map(_is_whole, found.values())):
        return ""
    if len(found) < 2:
        return f"modules.{recipe.sink} is the recipe's only module"
    given = (
        f"modules.{name} has no initial_load_path"
        if each is None
        else f"modules.{name}.initial_load_path = '{each.path}'"
        for name, each in found.items()
    )
    return f"its modules do not all come from one directory ({', '.join(given)})"


def _is_whole(pretrained: Pretrained | None) -> bool:
    """Whether a directory is that of a multimodal model of transformers."""
    return pretrained is not None and class_of(pretrained.config).endswith("ForConditionalGeneration")
