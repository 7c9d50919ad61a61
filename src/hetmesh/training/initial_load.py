"""Start from the weights of another run: `[checkpoint] initial_load_path`, a step folder that `hetmesh train` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.models.lora import base_name, is_adapter
from hetmesh.training.checkpointing.fit import differences
from hetmesh.training.checkpointing.folders import COMPLETE, complete_steps
from hetmesh.training.checkpointing.reading import opened, read_into
from hetmesh.training.checksums import METADATA, no_manifest
from hetmesh.training.optimizers import Root

KEY = "checkpoint.initial_load_path"
_SHOWN = 8  # names in one message


def check_initial_path(path: Path) -> None:
    """Raise RecipeError unless there is a complete checkpoint at `path`."""
    if (path / COMPLETE).is_file():
        return
    if (path / METADATA).is_file():
        raise RecipeError(f"{KEY} = {str(path)!r}: {no_manifest(path)}")
    try:
        there = ", ".join(f"step-{step}" for step in complete_steps(path.parent))
    except OSError:
        there = ""
    raise RecipeError(
        f"{KEY} = {str(path)!r}: no complete checkpoint there; {path.parent} has {there or 'none'}: train the recipe "
        "that is to leave it, or name another folder"
    )


def load_initial_weights(world: World, root: Root, path: Path, exclude: Sequence[str] = ()) -> None:
    """Read the parameters and buffers of this rank's modules from the DCP checkpoint at `path`. Collective.

    Adapters (LoRA) that the checkpoint does not have start afresh; their layers find the weights they had before.

    Args:
        exclude: modules, or prefixes of parameter names, that keep the weights they have.

    Raises:
        RecipeError: there is no complete checkpoint, `exclude` matches nothing, or tensors are missing or have other
            shapes or types; the message names them, and is the same on every rank.
        CheckpointError: the checkpoint cannot be read, or bytes have changed since it was written; on every rank.
    """
    check_initial_path(path)
    index = opened(world, path)
    state: dict[str, Any] = {}
    left_out: set[str] = set()
    for name, tensor in root.state_dict().items():
        key = f"model.{base_name(name)}"
        matching = {e for e in exclude if name == e or name.startswith(f"{e}.")}
        left_out |= matching
        if not matching and not (is_adapter(name) and key not in index.saved):
            state[key] = tensor
    everybody: list[Any] = [None] * world.size
    everyone = world.group(range(world.size))
    with world.waiting(f"comparing {path} with the recipe"):
        dist.all_gather_object(everybody, (left_out, differences(state, index.saved)), group=everyone)
    unused = sorted(set(exclude).difference(*(names for names, _ in everybody)))
    if unused:
        raise RecipeError(f"checkpoint.exclude_from_loading: {unused} match no module and no parameter of the recipe")
    wrong = list(dict.fromkeys(text for _, some in everybody for text in some))
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise RecipeError(f"{KEY} = {str(path)!r} does not fit this recipe: {'; '.join(wrong[:_SHOWN])}{more}")
    read_into(world, path, state, index)  # in place: these are the parameters
