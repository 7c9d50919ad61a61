"""Folders of checkpoints: which are complete, how one gets its name, which are deleted."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.records import checksums
from hetmesh.records.checksums import MANIFEST

COMPLETE = MANIFEST  # written last, and the folder gets its name after that
PARTIAL = ".partial"  # what a save adds to the folder's name until all is written
RESTORE, GO_ON = "restore it from a copy", "remove the folder to go on without it"
_LOOK_S = 0.1  # between two looks at a folder of another machine
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in `folder`, ascending. Raises OSError if the folder cannot be read."""
    return _steps(folder, lambda path: (path / COMPLETE).is_file())


def newest_step(folder: Path) -> int:
    """The newest step with a complete checkpoint in `folder`, -1 if there is none. Raises CheckpointError: a newer one
    has lost its checksums; OSError."""
    named = _steps(folder, lambda path: any(file.is_file() for file in path.iterdir()))
    newest = max(complete_steps(folder), default=-1)  # after that: a run may go on there meanwhile
    for step in named:
        if step > newest:  # it had its name when all was there
            raise CheckpointError(f"{checksums.no_manifest(folder / f'step-{step}')}; {RESTORE}, or {GO_ON}")
    return newest


def check_complete(path: Path, key: str) -> None:
    """Raise RecipeError, naming the recipe's `key`, unless there is a complete checkpoint at `path`."""
    if (path / COMPLETE).is_file():
        return
    if (path / checksums.METADATA).is_file():
        raise RecipeError(f"{key} = {str(path)!r}: {checksums.no_manifest(path)}")
    there = f"{path.parent} has none"
    with contextlib.suppress(OSError):  # it may be the folder of a run, or that of its checkpoints
        found = {folder: steps for folder in (path.parent, path, *path.glob("*/")) if (steps := complete_steps(folder))}
        has = (f"{folder} has {', '.join(f'step-{step}' for step in steps)}" for folder, steps in found.items())
        there = "; ".join(has) or there
    hint = f"{there}: train the recipe that is to leave it, or name another folder"
    raise RecipeError(f"{key} = {str(path)!r}: no complete checkpoint there; {hint}")


def advice(folder: Path, step: int, reason: str) -> str:
    """What to do about the checkpoint of `step` in `folder`, which cannot be read for `reason`. Earlier ones
    are no help where they are linked to the damaged file."""
    earlier = [other for other in complete_steps(folder) if other < step]
    files = [file for file in (folder / f"step-{step}").glob("*.distcp") if file.name in reason]
    others = [(s, file, folder / f"step-{s}" / file.name) for s in earlier for file in files]
    linked = [s for s, file, other in others if other.is_file() and os.path.samefile(file, other)]
    usable = [s for s in earlier if s not in linked]
    also = f"; it is in {', '.join(f'step-{s}' for s in linked)} too, by a link" if linked else ""
    go_on = f"remove the folder to resume from step-{usable[-1]}" if usable else "" if linked else GO_ON
    return f"{RESTORE}, or {go_on}{also}" if go_on else f"{RESTORE}{also}"


def step_of(path: Path) -> int | None:
    """The step after which the folder `path` is named; None for other names."""
    name = _STEP.fullmatch(path.name)
    return int(name.group(1)) if name else None


def _steps(folder: Path, holds: Callable[[Path], bool]) -> list[int]:
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a run that goes on there has retired it
            if (step := step_of(path)) is not None and path.is_dir() and holds(path):
                found.append(step)
    return sorted(found)


def probe(folder: Path) -> Path:
    """Make `folder` and a new file in it, which is returned; remove what killed saves left. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".probe-{secrets.token_hex(4)}{PARTIAL}"
    file.write_bytes(b"x")
    for leftover in (*folder.glob(f"step-*{PARTIAL}"), *folder.glob(f".probe*{PARTIAL}")):
        if leftover != file:
            _remove(leftover)
    return file


def unusable(file: Path, rank: int, patience: float) -> str:
    """Why `rank` cannot write beside rank 0, which has made `file`, and removes it; empty if it can. It may take
    `patience` seconds until `file` is seen."""
    here, deadline = f"rank {rank} on {socket.gethostname()}", time.monotonic() + patience
    shared = "all machines need the same job.dump_folder, on a file system that they share"
    probe_file = file.with_name(f"{file.name}.{rank}{PARTIAL}")
    try:
        while not file.exists():
            if time.monotonic() > deadline:
                return f"{here} does not see what rank 0 writes there: {shared}"
            time.sleep(_LOOK_S)
        probe_file.write_bytes(b"x")
        probe_file.unlink()
    except OSError as error:
        return f"{here}: {error}"
    return ""


def make_partial(path: Path) -> Path:
    """Make the folder in which the checkpoint `path` is written. Its name was never used: what a rank of an earlier run
    may still write, from another machine, goes nowhere. Raises OSError."""
    folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    folder.mkdir(parents=True)
    return folder


def complete(partial: Path, path: Path, sums: Mapping[checksums.SavedPart, checksums.Sum]) -> None:
    """Make what is written at `partial` the checkpoint `path`. Raises OSError."""
    checksums.write_manifest(partial, sums)
    _sync(partial)  # the names of its files, before it has its own
    old = path.with_name(f"{path.name}.old{PARTIAL}")  # so that `probe` removes what a kill leaves
    _remove(old)
    if path.exists():  # of the same step: an earlier run's, or half of one
        path.rename(old)
    partial.rename(path)
    _remove(old)
    _sync(path.parent)


def retire_old(folder: Path, keep_latest: int) -> list[Path]:
    """Take their names from the checkpoints in `folder` but for the `keep_latest` newest; from none if that is 0. Gives
    what they are called now, to be removed: a folder that is half gone is no checkpoint. Raises OSError."""
    retired = []
    for old in complete_steps(folder)[:-keep_latest] if keep_latest else ():
        retired.append(folder / f"step-{old}.{secrets.token_hex(4)}.old{PARTIAL}")
        (folder / f"step-{old}").rename(retired[-1])
    return retired


def remove_old(folder: Path, keep_latest: int) -> None:
    """Remove what a run leaves that is killed between naming a checkpoint and removing older ones. Raises OSError."""
    for old in retire_old(folder, keep_latest):
        _remove(old)


def _sync(folder: Path) -> None:
    """Let the names in `folder` be on the disk."""
    with contextlib.suppress(OSError):  # not every file system knows this
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
