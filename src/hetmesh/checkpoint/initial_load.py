"""Start from the weights of another run: `[checkpoint] initial_load_path`, a step folder that `hetmesh train` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary import World
from hetmesh.checkpoint.initial_fit import MODEL, Needs, left_out, module_of, unused, verdict
from hetmesh.checkpoint.reading import opened, read_into
from hetmesh.checkpoint.resume import RUN, RunState
from hetmesh.errors import RecipeError
from hetmesh.parallel.apply import Root
from hetmesh.parallel.gradient_sums import local_part
from hetmesh.records.checkpoint_folders import check_complete

T = TypeVar("T")

KEY = "checkpoint.initial_load_path"
_SHOWN = 8  # names in one message


def load_initial_weights(world: World, root: Root, path: Path, exclude: Sequence[str] = ()) -> None:
    """Read the parameters and buffers of this rank's modules from the DCP checkpoint at `path`. Collective.

    Adapters (LoRA) that the checkpoint does not have start afresh; their layers find the weights they had before.
    Modules that only the checkpoint has are left there, which rank 0 says.

    Args:
        exclude: modules, or prefixes of parameter names, that keep the weights they have, or stay in the checkpoint.

    Raises:
        RecipeError: there is no complete checkpoint, `exclude` matches nothing, tensors are missing or have other
            shapes or types, a module has no use for some, or adapters are of another rank or alpha; the message names
            them, and is the same on every rank.
        CheckpointError: the checkpoint cannot be read, or bytes have changed since it was written; on every rank.
    """
    check_complete(path, KEY)
    index = opened(world, path)
    about: dict[str, Any] = {RUN: ""}
    if RUN in index.saved:
        read_into(world, path, about, index)
    run = RunState.of(about[RUN])
    needs = Needs.of(root, exclude, index.saved, run.references)
    ranks = _gathered(world, needs.without_tensors(), f"comparing {path} with the recipe")
    for note in judged(path, ranks, exclude, index.saved, run):
        if world.rank == 0:
            print(note, flush=True)
    state = dict(needs.state)  # in place: these are the parameters
    copies = _second_names(state)
    read_into(world, path, state | {second: copy for _, second, copy in copies}, index)
    apart = [_untied(first, second) for first, second, copy in copies if not _equal(state[first], copy)]
    told_by = _gathered(world, apart, f"weights of {path} with two names")
    _refuse(path, [*dict.fromkeys(text for some in told_by for text in some)])


def judged(
    path: Path, ranks: Sequence[Needs], exclude: Sequence[str], saved: Mapping[str, Any], run: RunState
) -> list[str]:
    """What is worth a note of a checkpoint that holds `saved` and fits what all `ranks` need.

    Raises:
        RecipeError: it does not, or `exclude` matches nothing.
    """
    if free := unused(ranks, exclude, saved):
        raise RecipeError(
            f"checkpoint.exclude_from_loading: {free} match no module and no parameter, of the recipe or of {path}"
        )
    _refuse(path, verdict(ranks, exclude, saved, run))
    names = left_out(ranks, exclude, saved)
    return [f"{KEY}: {path} also holds {', '.join(names)}, which this recipe does not have"] if names else []


def _gathered(world: World, value: T, doing: str) -> list[T]:
    """Of every rank. Collective."""
    everybody: list[Any] = [None] * world.size
    with world.waiting(doing):
        dist.all_gather_object(everybody, value, group=world.group(range(world.size)))
    return everybody


def _refuse(path: Path, wrong: Sequence[str]) -> None:
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise RecipeError(f"{KEY} = {str(path)!r} does not fit this recipe: {'; '.join(wrong[:_SHOWN])}{more}")


def _second_names(state: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    """Of every tensor of `state` with several names (tied weights): the first one, a further one, and memory for what a
    checkpoint has under that, which is another value where nothing was tied."""
    firsts: dict[tuple[int, torch.Size], str] = {}
    found = []
    for name, tensor in state.items():
        part = local_part(tensor)
        if part.numel():
            first = firsts.setdefault((part.data_ptr(), part.shape), name)
            if first != name:
                found.append((first, name, torch.empty_like(tensor)))
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether this rank's parts are equal bit by bit."""
    first, second = (local_part(each).flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def _untied(*keys: str) -> str:
    return (
        f"{' and '.join(key.removeprefix(MODEL) for key in keys)} are one here (tied) and two there: set "
        f"modules.{module_of(keys[0])}.config.tie_word_embeddings = false, or name the one to leave out in "
        "checkpoint.exclude_from_loading"
    )
