"""What an exported directory was made from: a file in it says so, so that a stale one is not taken for a new one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.files import from_json, read_file, to_json, write_json, writing
from hetmesh.records.checksums import manifest_sum

MADE_FROM = "hetmesh_export.json"


def made_from(run: SavedRun, dtype: object, *, merge: bool) -> dict[str, Any]:
    """What an export is made from, as JSON has it: the checkpoint by the checksum of its checksums, its modules as the
    recipe describes them, and what is done with dtypes and adapters.

    Raises:
        CheckpointError: the checkpoint has no checksums.
    """
    modules = {name: each.model_dump(mode="json", by_alias=True) for name, each in run.recipe.modules.items()}
    return {
        "checkpoint": run.path.name,  # no path: exports are given to others
        "checksums_sha256": manifest_sum(run.path),
        "modules_sha256": hashlib.sha256(to_json(modules).encode()).hexdigest(),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "lora": "merged" if merge else "adapters",
    }


def write_made_from(folder: Path, told: Mapping[str, Any]) -> None:
    """Write it into an exported directory. Raises OutputError."""
    write_json(folder / MADE_FROM, told, indent=2)


def is_made_from(folder: Path, told: Mapping[str, Any]) -> bool:
    """Whether the directory was made from just that; one that does not say it, of an older version or another
    program's, was not."""
    try:
        found = from_json(read_file(folder / MADE_FROM))
    except (OSError, ValueError):
        return False
    return bool(found == told)


def put_aside(folder: Path) -> Path:
    """Give an exported directory another name, which it returns: somebody may still want it. Raises OutputError."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with writing(folder):
        folder.rename(aside)
    return aside
