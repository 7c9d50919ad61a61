"""Which folder a run writes to: one that it resumes, or one without results of another run. Rank 0 looks and claims it:
a file in it is locked; where the file system has no locks, a name is taken that processes of this machine share. Both
end with the process that has them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.errors import HetmeshError, OutputError, RecipeError
from hetmesh.files import read_lines, read_object, to_json, writing
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.checkpoint_folders import complete_steps, newest_step
from hetmesh.records.events import EVENTS_FILE

RECIPE_FILE = "recipe.json"
"""In a run's folder: the recipe with all defaults, as it was last started. Locked while the run writes there."""

CODE_FOLDER = "code_folder"
"""Beside the recipe's tables in that file, where it names code: the folder that it was read from."""

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
ANSWERS_FILE = "answers.json"
TIMELINE_FILE = "timeline.json"
"""`step`, `measured` and, where the sizes of all modules are known, `predicted`."""

_ENDING_S = 3.0  # that a run which was killed a moment ago may take to end
_HINT = "job.dump_folder must be a folder that can be written"


@dataclass(frozen=True, eq=False)
class Claim:
    """A file of a folder, open to be read and written, that is this process's alone: locked, or `name` is taken in
    place of a lock. `unnoticed`: which runs in the same folder nobody would notice; empty: none."""

    file: IO[str]
    unnoticed: str = ""
    name: socket.socket | None = None

    def close(self) -> None:
        """Let others have the folder."""
        self.file.close()
        if self.name is not None:
            self.name.close()


def claim_by(path: Path) -> Claim | None:
    """Claim the folder of `path`, a file that is made where there is none; None: another run has it. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Claim(file)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system that knows no locks
        pass
    try:
        return Claim(file, "one of another machine", _taken(path))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            file.close()
            return None
        return Claim(file, "another one")  # only Linux has such names


def _taken(path: Path) -> socket.socket:
    """A name that stands for `path`, in no file system: a socket's, which nobody else can bind. Raises OSError."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0hetmesh-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}")
    except OSError:
        name.close()
        raise
    return name


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, equal on all ranks.

    Attributes:
        step: the checkpoint to resume from; None for a run that starts anew.
        evaluated: whether an evaluation after `step` is in its metrics.jsonl; the last start may have ended before it.
        occupied: the recipe's dump_folder, where another run's results are in it; None where `path` is that folder.
        summary: of a run that is finished and has nothing left to do; None otherwise.
        claim: rank 0's, of recipe.json, by which others know that a run is writing here; None on other ranks.
    """

    path: Path
    step: int | None = None
    occupied: Path | None = None
    summary: dict[str, Any] | None = None
    evaluated: bool = False
    claim: Claim | None = field(default=None, compare=False, repr=False)

    def describe(self) -> list[str]:
        """What a user should know before the run starts, a line each."""
        lines = []
        if self.occupied is not None:
            lines.append(f"results of another run are in {self.occupied}: this one writes to {self.path}")
        if self.step is not None:
            lines.append(f"resuming at step {self.step} of {self.path}")
        if self.claim is not None and self.claim.unnoticed:
            unnoticed = f"while this run writes there, {self.claim.unnoticed} would not be noticed"
            lines.append(f"note: {self.path} is on a file system without file locks: {unnoticed}")
        return lines

    def release(self) -> None:
        """Let others have the folder."""
        if self.claim is not None:
            self.claim.close()

    def begin(self, recipe: Recipe) -> None:
        """Write down the recipe; drop an earlier summary and the metrics of steps that will come again, and of the last
        step's evaluation, which does too. Nothing is changed before this: a resume that is refused leaves everything as
        it was. Does nothing on ranks without the claim."""
        if self.claim is None:
            return
        with writing(self.path / RECIPE_FILE, _HINT):
            tables = recipe.model_dump(mode="json", by_alias=True)
            if recipe.code_folder is not None:
                tables[CODE_FOLDER] = recipe.code_folder
            _replace_content(self.claim.file.fileno(), (to_json(tables, indent=2) + "\n").encode())
        if self.step is not None:
            again = self.step == recipe.training.steps and recipe.validation.enable
            trim_metrics(self.path / METRICS_FILE, self.step, evaluates=again)
            with writing(self.path / SUMMARY_FILE):  # of a run that had fewer steps; not of this one before its end
                (self.path / SUMMARY_FILE).unlink(missing_ok=True)


def _replace_content(descriptor: int, text: bytes) -> None:
    """Let JSON be what a file holds, which is JSON at every instant: a kill may come at any, and the file is locked, so
    that another one cannot take its name. A disk without room for it leaves what was there. Raises OSError."""
    size = os.fstat(descriptor).st_size
    more = b" " * (len(text) - size)
    if more and os.pwrite(descriptor, more, size) < len(more):
        os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.pwrite(descriptor, text.ljust(size), 0)
    os.ftruncate(descriptor, len(text))


def claim_folder(recipe: Recipe, world: World) -> RunFolder:
    """Choose the folder of a run and claim it. Collective: rank 0 looks, the others get its answer.

    With `[checkpoint] enable` a run goes on from the newest checkpoint under its dump_folder (or the folder that it
    took). Otherwise results are left alone: `digits` is followed by `digits-2`, `digits-3` and so on.

    Raises:
        OutputError: the folder cannot be written, its metrics.jsonl is not a run's, or a run is writing there.
        CheckpointError: the newest checkpoint has lost its checksums.
        RecipeError: `[training] steps` is below the step of the checkpoint.
    """
    chosen: RunFolder | None = None
    message: list[Any] = [None]
    if world.rank == 0:
        try:
            chosen = _claim(recipe)
            message = [(str(chosen.path), chosen.step, chosen.occupied, chosen.summary, chosen.evaluated)]
        except (HetmeshError, OSError) as error:
            message = [error]
    with world.waiting("choice of the run's folder", "rank 0"):
        dist.broadcast_object_list(message, src=0, group=world.group(range(world.size)), device=world.device)
    if isinstance(message[0], Exception):
        raise message[0]
    path, *rest = message[0]
    return chosen or RunFolder(Path(path), *rest)


def _claim(recipe: Recipe) -> RunFolder:
    asked, checkpoints = _asked(recipe.job.dump_folder), recipe.checkpoint.folder
    if (run := resumable(recipe)) is not None:
        return _resumed(recipe, run)
    for number in itertools.count(1):
        folder = asked if number == 1 else asked.with_name(f"{asked.name}-{number}")
        with writing(folder, _HINT):
            if _holds_results(folder, checkpoints) or (claim := _locked(folder)) is None:
                continue
            if not _holds_results(folder, checkpoints):  # nobody was quicker than the lock
                return RunFolder(folder, occupied=None if folder == asked else asked, claim=claim)
            claim.close()
    raise AssertionError("there are always more numbers")


@dataclass(frozen=True)
class Resumable:
    """A run with a checkpoint, as its folder shows it.

    Attributes:
        step: of the newest complete checkpoint.
        summary: empty for a run that is not finished.
    """

    path: Path
    step: int
    summary: dict[str, Any]


def resumable(recipe: Recipe) -> Resumable | None:
    """What a run of `recipe` goes on from; None: it starts anew. Raises OutputError: a folder cannot be read;
    CheckpointError: the newest checkpoint has lost its checksums."""
    if not recipe.checkpoint.enable:
        return None
    asked = _asked(recipe.job.dump_folder)
    for folder in reversed([asked, *_followers(asked)]):
        summary = read_object(folder / SUMMARY_FILE)
        with writing(folder, _HINT):
            step = newest_step(folder / recipe.checkpoint.folder)
        if step >= 0:
            return Resumable(folder, step, summary)
    return None


def _asked(dump_folder: str) -> Path:
    asked = Path(dump_folder)
    asked = asked if asked.name not in ("", "..") else asked.resolve()
    if not asked.name:
        raise RecipeError(f"job.dump_folder = {dump_folder!r}: give a folder of the run's own")
    return asked


def _followers(asked: Path) -> list[Path]:
    """Folders beside `asked` that earlier runs took because there were results in `asked`, by their numbers: some may
    have been removed since."""
    try:
        beside = os.listdir(asked.parent)
    except OSError:  # nor can a run make folders there then
        return []
    numbered = rf"{re.escape(asked.name)}-([2-9]|[1-9][0-9]{{1,3}})"  # more digits are the date of somebody's copy
    numbers = [re.fullmatch(numbered, name) for name in beside]
    folders = [asked.with_name(f"{asked.name}-{n}") for n in sorted(int(name[1]) for name in numbers if name)]
    return [folder for folder in folders if _asked_for(folder) == asked.name]


def _asked_for(folder: Path) -> str | None:
    try:
        return Path(read_object(folder / RECIPE_FILE)["job"]["dump_folder"]).name
    except (KeyError, TypeError):
        return None


def _resumed(recipe: Recipe, run: Resumable) -> RunFolder:
    folder, step, steps = run.path, run.step, recipe.training.steps
    if steps < step:
        hint = "raise it, or give another job.dump_folder to start anew"
        raise RecipeError(f"training.steps = {steps}: the run in {folder} is at step {step} already; {hint}")
    if steps == step == run.summary.get("steps"):
        return RunFolder(folder, step, summary=run.summary)
    with writing(folder, _HINT):
        claim, deadline = _locked(folder), time.monotonic() + _ENDING_S
        while claim is None and time.monotonic() < deadline:
            time.sleep(0.05)
            claim = _locked(folder)
    if claim is None:
        hint = "wait for it, or give another job.dump_folder to start anew"
        raise OutputError(f"{folder}: another process is training there; {hint}")
    if resumable(recipe) != run:
        claim.close()  # the run that had the lock until now went on meanwhile
        return _claim(recipe)
    kept, _ = _kept_lines(folder / METRICS_FILE, step)
    evaluated = any(record["step"] == step and "validation" in record for _, record in kept)
    return RunFolder(folder, step, claim=claim, evaluated=evaluated)


def _locked(folder: Path) -> Claim | None:
    """The claim of the folder, by its recipe.json; None where another process has it. Raises OSError too."""
    _check_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return claim_by(folder / RECIPE_FILE)


def _check_files(folder: Path) -> None:
    """Raise OutputError for a file that rank 0 could not open once all ranks train: the others would wait for it."""
    for file in (folder / name for name in (RECIPE_FILE, METRICS_FILE, EVENTS_FILE, SUMMARY_FILE)):
        if file.is_dir():
            raise OutputError(f"{file} cannot be written: it is a folder; remove it, or give another job.dump_folder")
        if file.exists() and not os.access(file, os.W_OK):
            raise OutputError(f"{file} cannot be written: permission denied; {_HINT}")


def _holds_results(folder: Path, checkpoints: str) -> bool:
    """Whether a run has left lines of metrics, a summary, events or a complete checkpoint in `folder`."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} cannot be written: it is a file; {_HINT}")
    metrics, events = folder / METRICS_FILE, folder / "tensorboard"
    if metrics.exists() and metrics.stat().st_size:
        return True
    if any((folder / name).exists() for name in (SUMMARY_FILE, TIMELINE_FILE)):
        return True
    return (events.is_dir() and any(events.iterdir())) or bool(complete_steps(folder / checkpoints))


def check_folder(recipe: Recipe) -> None:
    """Raise OutputError where a run of `recipe` cannot write its files, as far as that is seen without making any."""
    run = resumable(recipe)
    folder = _asked(recipe.job.dump_folder) if run is None else run.path
    with writing(folder, _HINT):
        if run is not None or not _holds_results(folder, recipe.checkpoint.folder):
            _check_files(folder)


def trim_metrics(path: Path, step: int, *, evaluates: bool = False) -> None:
    """Drop the lines of metrics.jsonl after `step`, which will come again (where it `evaluates`, the evaluation after
    `step` too), and a last one that a kill cut short. Raises OutputError: the file holds anything but a run's lines, or
    cannot be written."""
    if not path.exists():
        return
    kept, _ = _kept_lines(path, step)
    with writing(path):
        temporary = path.with_suffix(".part")
        again = step if evaluates else None
        lines = (line for line, record in kept if not (record["step"] == again and "validation" in record))
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(path)  # a kill right here loses nothing


def steps_after(folder: Path, step: int) -> int:
    """How many steps after `step` a run's metrics.jsonl knows. Raises OutputError: see `trim_metrics`."""
    _, later = _kept_lines(folder / METRICS_FILE, step)
    return later[-1]["step"] - step if later else 0


def _kept_lines(path: Path, step: int) -> tuple[list[tuple[str, dict[str, Any]]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl up to `step` and what they hold, and what later ones hold; without a last one that a
    kill cut short. Raises OutputError: see `trim_metrics`."""
    kept: list[tuple[str, dict[str, Any]]] = []
    later: list[dict[str, Any]] = []
    with writing(path):
        lines = read_lines(path) if path.exists() else []
    for number, (line, record) in enumerate(lines, 1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            if number == len(lines):
                break  # what a kill cut short
            hint = "move the file away, or give another job.dump_folder"
            raise OutputError(f"{path}, line {number}: {line[:60]!r} is not a step of a run; {hint}")
        if record["step"] <= step:
            kept.append((line + "\n", record))
        else:
            later.append(record)
    return kept, later
