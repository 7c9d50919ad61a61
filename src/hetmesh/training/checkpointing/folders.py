"""Folders of checkpoints: which are complete, how one gets its name, which are deleted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hetmesh.errors import CheckpointError
from hetmesh.training import checksums
from hetmesh.training.checksums import MANIFEST, METADATA

COMPLETE = MANIFEST  # written last, and the folder gets its name after that
PARTIAL = ".partial"  # what a save adds to the folder's name until all is written
RESTORE, GO_ON = "restore it from a copy", "remove the folder to go on without it"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in `folder`, ascending. Raises OSError if the folder cannot be read."""
    return _steps_with(folder, COMPLETE)


def newest_step(folder: Path) -> int:
    """The newest step with a complete checkpoint in `folder`, -1 if there is none.

    Raises:
        CheckpointError: a newer one has lost its checksums.
        OSError: the folder cannot be read.
    """
    newest = max(complete_steps(folder), default=-1)
    for step in _steps_with(folder, METADATA):
        if step > newest:
            raise CheckpointError(f"{checksums.no_manifest(folder / f'step-{step}')}; {RESTORE}, or {GO_ON}")
    return newest


def _steps_with(folder: Path, file: str) -> list[int]:
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(m.group(1)) for m, path in found if m and (path / file).is_file())


def probe(folder: Path) -> None:
    """Make `folder`, see that files can be written there, and remove what killed saves left. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".probe{PARTIAL}"
    file.write_bytes(b"x")
    file.unlink()
    for leftover in folder.glob(f"step-*{PARTIAL}"):
        _remove(leftover)


def make_empty(folder: Path) -> None:
    """Make `folder`, without whatever was there. Raises OSError."""
    _remove(folder)
    folder.mkdir(parents=True)


def complete(partial: Path, path: Path, sums: Mapping[checksums.SavedPart, checksums.Sum]) -> None:
    """Make what is written at `partial` the checkpoint `path`. Raises OSError."""
    checksums.write_manifest(partial, sums)
    old = path.with_name(f"{path.name}.old{PARTIAL}")  # so that `probe` removes what a kill leaves
    _remove(old)
    if path.exists():  # of the same step: an earlier run's, or half of one
        path.rename(old)
    partial.rename(path)
    _remove(old)
    with contextlib.suppress(OSError):  # not every file system knows this
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def delete_old(folder: Path, keep_latest: int) -> None:
    """Delete the checkpoints in `folder` but for the `keep_latest` newest; none if that is 0. Raises OSError."""
    for old in complete_steps(folder)[:-keep_latest] if keep_latest else ():
        gone = folder / f"step-{old}{PARTIAL}"  # at once: a folder that is half gone is no checkpoint
        _remove(gone)
        (folder / f"step-{old}").rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
