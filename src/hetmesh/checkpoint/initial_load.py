"""Start from the weights of another run: `[checkpoint] initial_load_path`, a step folder that `hetmesh train` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.checkpoint.fit import MODEL, Needs, left_out, module_of, unused, verdict
from hetmesh.checkpoint.reading import first_of, read_into
from hetmesh.checkpoint.resume import RunState, read_run
from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.errors import RecipeError
from hetmesh.models.weights.build import build_on_meta
from hetmesh.parallel.apply import Root
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.records.checkpoint_folders import check_complete
from hetmesh.resolve.modules import empty_module
from hetmesh.resolve.resolved import ResolvedRecipe

KEY = "checkpoint.initial_load_path"
_N_NAMES = 8  # in one message


def load_initial_weights(world: World, root: Root, path: Path, exclude: Sequence[str] = ()) -> None:
    """Read the parameters and buffers of this rank's modules from the DCP checkpoint at `path`. Collective.

    Adapters (LoRA) that the checkpoint does not have start afresh; their layers find the weights they had before.
    Modules that only the checkpoint has are left out, with a note on rank 0.

    Args:
        exclude: modules, or prefixes of parameter names, that keep the weights they have, or stay in the checkpoint.

    Raises:
        RecipeError: there is no complete checkpoint, `exclude` matches nothing, tensors are missing or have other
            shapes or types (but fp32 and bf16, of which one becomes the other), a module has no use for some, or
            adapters are of another rank or alpha; the message names them, and is the same on every rank.
        CheckpointError: the checkpoint cannot be read, or bytes have changed since it was written; on every rank.
    """
    check_complete(path, KEY)
    index, run = read_run(world, path)
    needs = Needs.of(root, exclude, index.saved, run.references)
    ranks = gather_objects(replace(needs, state={}), world, f"comparing {path} with the recipe")
    for note in _notes(path, ranks, exclude, index.saved, run):
        if world.rank == 0:
            print(note, flush=True)
    state = dict(needs.state)  # in place: these are the parameters
    copies = _second_names(state)
    read_into(world, path, state | {second: copy for _, second, copy in copies}, index)
    apart = [
        f"{first.removeprefix(MODEL)} and {second.removeprefix(MODEL)} are one here (tied) and two there: set "
        f"modules.{module_of(first)}.config.tie_word_embeddings = false, or name the one to leave out in "
        "checkpoint.exclude_from_loading"
        for first, second, copy in copies
        if not _equal(state[first], copy)
    ]
    by_rank = gather_objects(apart, world, f"weights of {path} with two names")
    _refuse(path, [*dict.fromkeys(text for texts in by_rank for text in texts)])


def check_initial_weights(resolved: ResolvedRecipe) -> list[str]:
    """Compare names, shapes and dtypes in `[checkpoint] initial_load_path` with those of the recipe's modules, in one
    process that reads no weights. Modules that cannot be built without memory are not compared, nor are values of
    weights that are tied here.

    Returns:
        Notes on what is not used.

    Raises:
        RecipeError: it does not fit.
        CheckpointError: it cannot be read.
    """
    recipe, adapters = resolved.recipe, resolved.adapters
    path, exclude = Path(str(recipe.checkpoint.initial_load_path)), recipe.checkpoint.exclude_from_loading
    known = {name: adapter for name, adapter in adapters.items() if build_on_meta(adapter) is not None}
    root = Root((name, empty_module(recipe, adapter, name)) for name, adapter in known.items())
    unknown = adapters.keys() - known.keys()
    run = SavedRun(recipe, path, resolved)
    saved = {k: e for k, e in run.index.saved.items() if not (k.startswith(MODEL) and module_of(k) in unknown)}
    rest = tuple(prefix for prefix in exclude if prefix.partition(".")[0] not in unknown)
    return _notes(path, [Needs.of(root, rest, saved, run.state.references)], rest, saved, run.state)


def _notes(
    path: Path, ranks: Sequence[Needs], exclude: Sequence[str], saved: Mapping[str, Any], run: RunState
) -> list[str]:
    """Notes on a checkpoint that holds `saved` and fits what all `ranks` need. Raises RecipeError: it does not, or
    `exclude` matches nothing."""
    if free := unused(ranks, exclude, saved):
        raise RecipeError(
            f"checkpoint.exclude_from_loading: {free} match no module and no parameter, of the recipe or of {path}"
        )
    _refuse(path, verdict(ranks, exclude, saved, run))
    names = left_out(ranks, exclude, saved)
    return [f"{KEY}: {path} also holds {', '.join(names)}, which this recipe does not have"] if names else []


def _refuse(path: Path, wrong: Sequence[str]) -> None:
    if wrong:
        raise RecipeError(f"{KEY} = {str(path)!r} does not fit this recipe: {first_of(wrong, _N_NAMES)}")


def _second_names(state: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    """Of every tensor of `state` with several names (tied weights): the first name, another one, and memory for what a
    checkpoint has under that, which is another value where nothing was tied."""
    firsts: dict[tuple[int, torch.Size], str] = {}
    seconds = []
    for name, tensor in state.items():
        part = local_part(tensor)
        if part.numel():
            first = firsts.setdefault((part.data_ptr(), part.shape), name)
            if first != name:
                seconds.append((first, name, torch.empty_like(tensor)))
    return seconds


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether this rank's parts are equal bit by bit."""
    return torch.equal(*(local_part(tensor).flatten().view(torch.uint8) for tensor in (one, other)))
