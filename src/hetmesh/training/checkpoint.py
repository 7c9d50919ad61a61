"""Checkpoints: torch's DCP, one folder per step, every rank writing what it owns. Resume is exact."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.boundary import World
from hetmesh.errors import CheckpointError, HetmeshError, RecipeError
from hetmesh.training import checksums
from hetmesh.training.checksums import MANIFEST, METADATA, Reader
from hetmesh.training.optimizers import Root

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
COMPLETE = MANIFEST  # written last, and the folder gets its name after that
PARTIAL = ".partial"  # what a save adds to the folder's name until all is written
_SHOWN = 3  # differences that an error names
_RESTORE, _GO = "restore it from a copy", "remove the folder to go on without it"


class Checkpointer:
    """Saves and loads the state of a run on every rank.

    A checkpoint holds the parameters and buffers of all modules (`model.<module>.<name>`), the optimizer's state by
    parameter name, the schedule, the data position, and each rank's random state. Loading needs the same modules and
    the same optimizer; nothing that is saved is left unread, except random states of ranks that no longer exist.

    Args:
        folder: where the step folders are.
        keep_latest: delete older ones beyond that many; 0 keeps all.
        timeout: seconds that writing or reading one may take; the timeout of a step does not count meanwhile.
    """

    def __init__(self, world: World, folder: Path, keep_latest: int = 0, timeout: float = 3600.0) -> None:
        self.world, self.folder, self.keep_latest, self.timeout = world, folder, keep_latest, timeout

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return complete_steps(self.folder)

    def prepare(self) -> None:
        """Make the folder, see that files can be written there, and remove what killed saves left. Collective; before
        hours of training.

        Raises:
            CheckpointError: they cannot; on every rank.
        """

        def probe() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f".probe{PARTIAL}"
            file.write_bytes(b"x")
            file.unlink()
            for leftover in self.folder.glob(f"step-*{PARTIAL}"):
                _remove(leftover)

        self._on_first(f"checkpoints cannot be written to {self.folder}", probe)

    def latest(self) -> int | None:
        """The newest complete step, as rank 0 sees it, on every rank. Collective.

        Raises:
            CheckpointError: the folder cannot be read, or a newer checkpoint has lost its checksums; on every rank.
        """
        chosen = [-1]

        def choose() -> None:
            chosen[0] = newest_step(self.folder)

        self._on_first(f"checkpoints in {self.folder} cannot be read", choose)
        with self.world.waiting("choice of the checkpoint to resume from"):
            dist.broadcast_object_list(chosen, src=0, group=self._everyone)
        return None if chosen[0] < 0 else chosen[0]

    def save(self, step: int, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps. Collective.

        It gets its name when all is on the disk: what a crash or a full disk leaves is never taken for a checkpoint.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        path = self.folder / f"step-{step}"
        partial = path.with_name(path.name + PARTIAL)
        fails = f"checkpoint {path} cannot be written"
        state = self._state(root, optimizers, extra)
        with self._patience(), self.world.waiting(f"saving {path}"):
            try:
                self._on_first(fails, lambda: _make_empty(partial))
                try:
                    dcp.save(state, checkpoint_id=str(partial), process_group=self._everyone)
                except CheckpointException as error:  # no Exception: it would pass by all that handles failures
                    raise CheckpointError(f"{fails}: {first_cause(error)}") from error
                sums = self._checksums(partial, fails)
                self._on_first(fails, lambda: _finish(partial, path, sums))
            except CheckpointError as error:
                hint = [""]
                if self.world.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                    hint = [self._what_to_do()]
                dist.broadcast_object_list(hint, src=0, group=self._everyone)
                raise CheckpointError(f"{error}{hint[0]}") from error
            self._on_first(f"old checkpoints in {self.folder} cannot be deleted", self._delete_old)
        return path

    def load(
        self, step: int, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Read the state of `step` into modules and optimizers. Collective.

        Returns:
            `extra` as it was saved.

        Raises:
            RecipeError: the checkpoint is of other modules or another optimizer; on every rank.
            CheckpointError: it cannot be read, or bytes have changed since it was written; on every rank.
        """
        path = self.folder / f"step-{step}"
        with self._patience():
            try:
                saved, sums = opened(self.world, path)
                state = self._state(root, optimizers, extra)
                state = {k: v for k, v in state.items() if k in saved or not _optional(k, saved)}
                self._check_fit(path, state, saved)
                read_into(self.world, path, state, sums)
            except CheckpointError as error:
                others = [s for s in self.steps() if s < step]
                hint = f"remove the folder to resume from step-{others[-1]}" if others else _GO
                raise CheckpointError(f"{error}; {_RESTORE}, or {hint}") from error
        root.load_state_dict(_under(state, "model."))
        if optimizers is not None:
            optimizers[0].load_state_dict(_under(state, "optimizer."))
            with warnings.catch_warnings():  # torchtitan's scheduler asks torch's for its rate in a frowned-upon way
                warnings.simplefilter("ignore", UserWarning)
                optimizers[1].load_state_dict(_under(state, "lr_scheduler."))
        random = _under(state, f"random.{self.world.rank}.")
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        device, module = self.world.accelerator.device, self.world.accelerator.random_module
        if module is not None and device.type in random:
            module.set_rng_state(random[device.type], device)
        return _under(state, "extra.")

    def on_first_rank(self, fails: str, action: Callable[[], object]) -> None:
        """Do `action` on rank 0, which may take as long as saving. Collective.

        Raises:
            CheckpointError: whatever goes wrong with it; on every rank.
        """

        def told() -> None:
            try:
                action()
            except HetmeshError as error:
                raise CheckpointError(f"{fails}: {error}") from error

        with self._patience():
            self._on_first(fails, told)

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """For the body, a rank waits for others as long as a checkpoint may take: disks are no stalled peers."""
        usual = self.world.timeout
        self.world.set_timeout(max(usual, self.timeout))
        try:
            yield
        finally:
            self.world.set_timeout(usual)

    def _on_first(self, fails: str, action: Callable[[], object]) -> None:
        """Do `action` on rank 0. What goes wrong with it is the same error on every rank."""
        errors = [""]
        if self.world.rank == 0:
            try:
                action()
            except CheckpointError as error:
                errors = [str(error)]
            except OSError as error:
                errors = [f"{fails}: {error}"]
        with self.world.waiting(f"rank 0 at {self.folder}"):
            dist.broadcast_object_list(errors, src=0, group=self._everyone)
        if errors[0]:
            raise CheckpointError(errors[0])

    def _checksums(self, folder: Path, fails: str) -> dict[checksums.SavedPart, int]:
        """Of all parts, on every rank; each rank reads what it has written, from the cache of its machine."""
        mine: dict[checksums.SavedPart, int] = {}
        error = ""
        try:
            parts = checksums.parts_of(checksums.read_metadata(folder))
            mine = checksums.checksums(folder, checksums.written_by(parts, self.world.rank))
        except OSError as problem:
            error = f"{fails}: {problem}"
        everybody: list[Any] = [None] * self.world.size
        dist.all_gather_object(everybody, (error, mine), group=self._everyone)
        for text, _ in everybody:
            if text:
                raise CheckpointError(text)
        return {part: crc for _, some in everybody for part, crc in some.items()}

    def _delete_old(self) -> None:
        for old in self.steps()[: -self.keep_latest] if self.keep_latest else ():
            (self.folder / f"step-{old}" / COMPLETE).unlink()  # first: a folder that is half gone is not complete
            shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)

    def _what_to_do(self) -> str:
        try:
            free, steps = f"{shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB", self.steps()
        except OSError:
            return "; set job.dump_folder to a folder that can be written"
        newest = f"; the newest complete one is step-{steps[-1]}" if steps else ""
        return f"; {free} are free there: make room, or set job.dump_folder to another disk{newest}"

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        return self.world.group(range(self.world.size))

    def _state(self, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {f"model.{k}": v for k, v in root.state_dict().items()}
        if optimizers is not None:
            state |= {f"optimizer.{k}": v for k, v in optimizers[0].state_dict().items()}
            state |= {f"lr_scheduler.{k}": v for k, v in optimizers[1].state_dict().items()}
        state |= {f"extra.{k}": v for k, v in extra.items()}
        state[f"random.{self.world.rank}.cpu"] = torch.get_rng_state()
        device, module = self.world.accelerator.device, self.world.accelerator.random_module
        if module is not None:
            state[f"random.{self.world.rank}.{device.type}"] = module.get_rng_state(device)
        return state

    def _check_fit(self, path: Path, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Compare names, shapes and dtypes on all ranks, so that all raise the same error before anything is read."""
        everybody: list[Any] = [None] * self.world.size
        with self.world.waiting(f"comparing {path} with the recipe"):
            dist.all_gather_object(everybody, (set(state), differences(state, saved)), group=self._everyone)
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
            raise CheckpointError(f"{checksums.no_manifest(folder / f'step-{step}')}; {_RESTORE}, or {_GO}")
    return newest


def _steps_with(folder: Path, file: str) -> list[int]:
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(m.group(1)) for m, path in found if m and (path / file).is_file())


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
            everyone = world.group(range(world.size))
            dcp.load(state, storage_reader=Reader(path), planner=checksums.Planner(), process_group=everyone)
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {first_cause(error)}") from error


def _raise_first(world: World, path: Path, errors: list[str]) -> None:
    """The first error that any rank has, as one error on every rank; how many more there are."""
    everybody: list[Any] = [None] * world.size
    with world.waiting(f"verifying {path}"):
        dist.all_gather_object(everybody, errors, group=world.group(range(world.size)))
    found = list(dict.fromkeys(text for some in everybody for text in some))
    if found:
        raise CheckpointError(found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))


def _make_empty(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(parents=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _finish(partial: Path, path: Path, sums: Mapping[checksums.SavedPart, int]) -> None:
    """Make what is written at `partial` the checkpoint `path`."""
    checksums.write_manifest(partial, sums)
    old = path.with_name(path.name + ".old")
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


def _optional(key: str, saved: Iterable[str]) -> bool:
    """Whether a checkpoint may lack `key`: the random state of a rank that did not exist; the recipe that older ones do
    not hold; the optimizer's state of a parameter that never had a gradient (and none must be made up, for it would
    begin with another step count)."""
    if key.startswith("random.") or key == "extra.run":
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


def first_cause(error: CheckpointException) -> str:
    """The first rank's error, without its stack."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
