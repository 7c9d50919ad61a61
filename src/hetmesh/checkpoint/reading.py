"""Reading a checkpoint: each rank what it holds, every byte compared with its checksum; one's error is all's."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from hetmesh.boundary import World
from hetmesh.checkpoint.dcp_reader import PlainReader, unpacked
from hetmesh.checkpoint.staging import is_plain
from hetmesh.errors import CheckpointError
from hetmesh.records import checksums


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        metadata: DCP's: names, shapes and places in files.
        sums: of the bytes there.
    """

    metadata: Metadata
    sums: Mapping[checksums.SavedPart, checksums.Sum]

    @property
    def saved(self) -> Mapping[str, Any]:
        """What is saved, by name."""
        found: Mapping[str, Any] = self.metadata.state_dict_metadata
        return found


def saved_tensors(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name.

    Raises:
        CheckpointError: it cannot be read.
    """
    return checksums.read_metadata(path).state_dict_metadata


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """In the body no garbage is looked for: an index is tens of thousands of objects, none of them garbage, and each
    look goes through all that a run has."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def opened(world: World, path: Path) -> Index:
    """What the checkpoint at `path` holds, once its index is known to be what was written. Collective.

    Raises:
        CheckpointError: it is not; on every rank.
    """
    error, found = "", Index(Metadata({}), {})
    try:
        sums = checksums.read_manifest(path)
        found = Index(checksums.read_metadata(path), sums)
    except CheckpointError as problem:
        error = str(problem)
    _raise_first(world, path, [error] if error else [])
    return found


@_uncollected()
def read_into(world: World, path: Path, state: dict[str, Any], index: Index) -> None:
    """Read the values of `state` from the checkpoint at `path`, tensors in place, and compare what is read with its
    checksums. Collective.

    Raises:
        CheckpointError: it cannot be read, or has changed; tensors may have been overwritten then. On every rank.
    """
    error, wrong = "", []
    try:
        wrong = _read(path, state, index)
    except Exception as problem:  # whatever reading makes of files that are no checkpoint's
        error = f"checkpoint {path} cannot be read: rank {world.rank}: {type(problem).__name__}: {problem}"
    _raise_first(world, path, [f"checkpoint {path} is damaged: {text}" for text in wrong] + [error] * bool(error))


def _read(path: Path, state: dict[str, Any], index: Index) -> list[str]:
    """What `dcp.load` does on one rank; what has changed. What it does between ranks, sending all plans to one of them,
    changes none."""
    reader, planner = PlainReader(path, index.sums), Planner()
    planner.set_up_planner(state, index.metadata, is_coordinator=False)
    reader.set_up_storage_reader(index.metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return reader.wrong


class Planner(dcp.DefaultLoadPlanner):
    """DCP's, which unpickles plain values only (DCP's runs whatever code they name), and equal ones once: options of
    optimizers are thousands, nearly all alike."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into its place."""
        content = value.getvalue()
        if content in self._known:
            found = self._known[content]
        else:
            found = unpacked(value)
            if is_plain(found):
                self._known[content] = found
        *path, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for part in path:
            place = place[part]
        place[last] = found


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
