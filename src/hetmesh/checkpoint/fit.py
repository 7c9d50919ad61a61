"""Whether a checkpoint is of the modules and optimizers at hand: names, shapes and types, and what differs in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.boundary import World
from hetmesh.data.loader import PART_LENGTHS, PART_PROBES, PROBES
from hetmesh.errors import RecipeError

_SHOWN = 3  # differences that an error names


def check_fit(world: World, path: Path, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare what this rank wants to read with what the checkpoint at `path` holds. Collective.

    Raises:
        RecipeError: they differ on some rank; the same on all, before anything is read.
    """
    everybody: list[Any] = [None] * world.size
    with world.waiting(f"comparing {path} with the recipe"):
        dist.all_gather_object(everybody, (set(state), differences(state, saved)), group=world.group(range(world.size)))
    expected = set().union(*(keys for keys, _ in everybody))
    wanted, held = _modules(expected), _modules(saved)
    if wanted != held:
        raise RecipeError(
            f"checkpoint {path} does not fit this recipe: it holds the modules {sorted(held)}, the recipe has "
            f"{sorted(wanted)}"
        )
    surplus = sorted(key for key in saved if key not in expected and not key.startswith("random."))
    found = [*dict.fromkeys(d for _, some in everybody for d in some), *(f"{k} is not used" for k in surplus)]
    if found:
        shown = "; ".join(found[:_SHOWN])
        more = len(found) - _SHOWN
        raise RecipeError(
            f"checkpoint {path} does not fit this recipe: {shown}" + (f" (and {more} more)" if more > 0 else "")
        )


def optional(key: str, saved: Iterable[str]) -> bool:
    """Whether a checkpoint may lack `key`: the random state of a rank that did not exist; the recipe and the samples
    looked at, which older ones do not hold; the optimizer's state of a parameter that never had a gradient (and none
    must be made up, for it would begin with another step count)."""
    newer = ("run", PROBES, PART_PROBES, PART_LENGTHS)
    if key.startswith("random.") or key in [f"extra.{each}" for each in newer]:
        return True
    prefix = "optimizer.state."
    parameter = key.removeprefix(prefix).rpartition(".")[0]
    return key.startswith(prefix) and not any(k.startswith(f"{prefix}{parameter}.") for k in saved)


def differences(state: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """What this rank needs and the checkpoint does not have like that, in words."""
    found = []
    for key, value in state.items():
        if key not in saved:
            found.append(f"it lacks {key}")
            continue
        entry = saved[key]
        was = (list(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        now = (list(value.shape), value.dtype) if isinstance(value, Tensor) else None
        if was != now:
            found.append(f"{key} was {_described(was)} and is {_described(now)}")
    return found


def _described(tensor: tuple[list[int], torch.dtype] | None) -> str:
    return "no tensor" if tensor is None else f"{tensor[1]} {tensor[0]}".removeprefix("torch.")


def _modules(keys: Iterable[str]) -> set[str]:
    return {key.split(".")[1] for key in keys if key.startswith("model.")}
