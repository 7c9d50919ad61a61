"""Start from the weights of another run: `[checkpoint] initial_load_path`, a step folder that `hetmesh train` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.models.lora import base_name, is_adapter
from hetmesh.training.optimizers import Root

KEY = "checkpoint.initial_load_path"


def load_weights(world: World, root: Root, path: Path, exclude: Sequence[str] = ()) -> None:
    """Read the parameters and buffers of this rank's modules from the DCP checkpoint at `path`. Collective.

    Adapters (LoRA) that the checkpoint does not have start afresh; their layers find the weights they had before.

    Args:
        exclude: modules, or prefixes of parameter names, that keep the weights they have.

    Raises:
        RecipeError: there is no complete checkpoint, `exclude` matches nothing, or tensors are missing or have other
            shapes; the message names them.
    """
    if not (path / ".metadata").is_file():
        raise RecipeError(f"{KEY} = {str(path)!r}: no complete checkpoint there; name a folder such as .../step-800")
    saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    saved_modules = {key.split(".")[1] for key in saved if key.startswith("model.")}
    known = {*saved_modules, *(name for name, _ in root.named_children())}
    for entry in exclude:
        if entry.split(".")[0] not in known:
            raise RecipeError(f"checkpoint.exclude_from_loading: {entry!r} matches no module; modules: {sorted(known)}")
    state: dict[str, Any] = {}
    wrong: list[str] = []
    for name, tensor in root.state_dict().items():
        key = f"model.{base_name(name)}"
        if any(name == e or name.startswith(f"{e}.") for e in exclude) or (is_adapter(name) and key not in saved):
            continue
        if key not in saved:
            wrong.append(f"{name} is missing")
        elif tuple(saved[key].size) != tuple(tensor.shape):  # type: ignore[union-attr]
            wrong.append(f"{name} has shape {tuple(saved[key].size)}, here {tuple(tensor.shape)}")  # type: ignore[union-attr]
        state[key] = tensor
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise RecipeError(f"{KEY} = {str(path)!r} does not fit: {'; '.join(wrong[:8])}{more}")
    with world.watchdog.watching(f"loading of {path}"):
        dcp.load(state, checkpoint_id=str(path))  # in place: state holds the very parameters
