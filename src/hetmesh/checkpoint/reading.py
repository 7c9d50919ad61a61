"""Reading a checkpoint by DCP's plan, index and reader: each rank reads its part, and every byte is compared with its
checksum before anything is made of it. An error on one rank is raised on all."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.checkpoint.save_plan import uneven_parts
from hetmesh.errors import CheckpointError
from hetmesh.records import checksums
from hetmesh.records.checksums import SavedPart

T = TypeVar("T")


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds: DCP's metadata (names, shapes, places in files) and the checksums of the bytes there."""

    metadata: Metadata
    sums: Mapping[SavedPart, checksums.Sum]

    @property
    def saved(self) -> Mapping[str, Any]:
        """DCP's description of tensors and other values, by name."""
        entries: Mapping[str, Any] = self.metadata.state_dict_metadata
        return entries

    @classmethod
    def of(cls, path: Path) -> Index:
        """Of the checkpoint at `path`. Raises CheckpointError: it has changed since it was written, or is missing."""
        sums = checksums.read_manifest(path)
        return cls(checksums.read_metadata(path), sums)


def read_index(world: World, path: Path) -> Index:
    """The index of the checkpoint at `path`, compared with its checksum. Collective. Raises CheckpointError: it has
    changed or cannot be read; on every rank."""
    return _on_all(world, path, lambda: Index.of(path))


def read_into(world: World, path: Path, state: dict[str, Any], index: Index) -> None:
    """Read the values of `state` from the checkpoint at `path`, tensors in place, and compare checksums. Collective.
    Raises CheckpointError: it cannot be read, or has changed; tensors may have been overwritten then. On every rank."""
    _on_all(world, path, lambda: read_alone(path, state, index, f"rank {world.rank}: "))


def read_alone(path: Path, state: dict[str, Any], index: Index, rank: str = "") -> None:
    """`read_into` on one rank, without others. It does what `dcp.load` does on each rank; what that does between ranks,
    sending all plans to one of them, changes none. Raises CheckpointError."""
    reader, planner = checksums.Reader(path, index.sums), Planner()
    try:
        planner.set_up_planner(state, index.metadata, is_coordinator=False)
        reader.set_up_storage_reader(index.metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {Path(error.filename).name} is missing") from error
    except Exception as error:  # whatever reading makes of files that are no checkpoint's
        raise CheckpointError(f"checkpoint {path} cannot be read: {rank}{type(error).__name__}: {error}") from error


class Planner(DefaultLoadPlanner):
    """DCP's, with the parts that ranks hold as FSDP2 cuts them (`uneven_parts`). It unpickles plain values only (DCP's
    runs whatever code they name)."""

    def create_local_plan(self) -> LoadPlan:
        plan, held, metadata = super().create_local_plan(), uneven_parts(self.state_dict), self.metadata
        items = [item for item in plan.items if item.dest_index.fqn not in held]
        if metadata is not None:
            for name, part in held.items():
                saved = metadata.state_dict_metadata[name]
                if all(part.sizes) and isinstance(saved, TensorStorageMetadata):
                    items += create_read_items_for_chunk_list(name, saved, [part])
        return replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into its place."""
        *path, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for part in path:
            place = place[part]
        place[last] = torch.load(value, map_location="cpu", weights_only=True)


def first_of(errors: Sequence[str], shown: int) -> str:
    """The first `shown` of `errors`, and how many more there are."""
    return "; ".join(errors[:shown]) + (f" (and {len(errors) - shown} more)" if len(errors) > shown else "")


def _on_all(world: World, path: Path, read: Callable[[], T]) -> T:
    """What `read` returns. The first CheckpointError that it raises on any rank is one on every rank, and says how many
    more there are."""
    error, found = "", None
    try:
        found = read()
    except CheckpointError as problem:
        error = str(problem)
    texts = [*dict.fromkeys(filter(None, gather_objects(error, world, f"verifying {path}")))]
    if texts:
        raise CheckpointError(first_of(texts, 1))
    return found  # type: ignore[return-value]
