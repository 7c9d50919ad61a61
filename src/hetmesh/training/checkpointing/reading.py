"""Reading a checkpoint: its bytes are compared with their checksums by all ranks before any rank takes anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from hetmesh.boundary import World
from hetmesh.errors import CheckpointError
from hetmesh.training import checksums


def saved_tensors(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name.

    Raises:
        CheckpointError: it cannot be read.
    """
    return checksums.read_metadata(path).state_dict_metadata


def opened(world: World, path: Path) -> tuple[dict[str, Any], dict[checksums.SavedPart, int]]:
    """What the checkpoint at `path` holds, by name, and the checksums of its parts, once its index is known to be what
    was written. Collective.

    Raises:
        CheckpointError: it is not; on every rank.
    """
    error, saved, sums = "", {}, {}
    try:
        sums = checksums.read_manifest(path)
        saved = saved_tensors(path)
    except CheckpointError as problem:
        error = str(problem)
    _raise_first(world, path, [error] if error else [])
    return saved, sums


def read_into(world: World, path: Path, state: dict[str, Any], sums: Mapping[checksums.SavedPart, int]) -> None:
    """Read the values of `state` from the checkpoint at `path`, in place, after all of its bytes have been compared
    with their checksums, a share on each rank. Collective.

    Raises:
        CheckpointError: it cannot be read, or has changed; nothing is read then. On every rank.
    """
    mine = checksums.share(list(sums), world.rank, world.size)
    wrong = checksums.damaged(path, {part: sums[part] for part in mine})
    _raise_first(world, path, [f"checkpoint {path} is damaged: {text}" for text in wrong])
    try:
        with world.waiting(f"loading {path}"):
            dcp.load(state, checkpoint_id=str(path), process_group=world.group(range(world.size)))
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {first_cause(error)}") from error


def first_cause(error: CheckpointException) -> str:
    """The first rank's error, without its stack."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _raise_first(world: World, path: Path, errors: list[str]) -> None:
    """The first error that any rank has, as one error on every rank; how many more there are."""
    everybody: list[Any] = [None] * world.size
    with world.waiting(f"verifying {path}"):
        dist.all_gather_object(everybody, errors, group=world.group(range(world.size)))
    found = list(dict.fromkeys(text for some in everybody for text in some))
    if found:
        raise CheckpointError(found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
