"""What training would refuse of `[checkpoint] initial_load_path`, found by one process that reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetmesh.checkpoint.initial_fit import MODEL, Needs, module_of
from hetmesh.checkpoint.initial_load import judged
from hetmesh.checkpoint.reading import saved_tensors
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.models import Adapter
from hetmesh.models.weights.build import build_on_meta
from hetmesh.parallel.apply import Root
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.modules import empty_module


def check_initial_weights(recipe: Recipe, adapters: Mapping[str, Adapter]) -> list[str]:
    """Compare the names, shapes and dtypes in the checkpoint that the run is to begin with with those of its modules.
    One that cannot be built without memory is not compared, nor are values of weights that are tied here.

    Returns:
        What is worth a note.

    Raises:
        RecipeError: it does not fit.
        CheckpointError: it cannot be read.
    """
    path, exclude = Path(str(recipe.checkpoint.initial_load_path)), recipe.checkpoint.exclude_from_loading
    known = {name: adapter for name, adapter in adapters.items() if build_on_meta(adapter) is not None}
    root = Root((name, empty_module(recipe, adapter, name).module) for name, adapter in known.items())
    unknown = adapters.keys() - known.keys()
    saved = {k: e for k, e in saved_tensors(path).items() if not (k.startswith(MODEL) and module_of(k) in unknown)}
    run = SavedRun(recipe, path).state
    rest = tuple(each for each in exclude if each.partition(".")[0] not in unknown)
    return judged(path, [Needs.of(root, rest, saved, run.references)], rest, saved, run)
