"""Checkpoints: torch's DCP, one folder per step, every rank writing what it owns. Resume is exact."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from hetmesh.boundary import World
from hetmesh.boundary.scalars import reduce_over_ranks
from hetmesh.checkpoint.fit import check_fit, optional
from hetmesh.checkpoint.frozen_tensors import FrozenFile, fingerprint_of, frozen_names
from hetmesh.checkpoint.reading import opened, read_into
from hetmesh.checkpoint.resume import RunState, saved_run
from hetmesh.checkpoint.save_plan import SavePlans
from hetmesh.checkpoint.saving import Content, PendingSave, SavePlace, cannot_write, file_names
from hetmesh.checkpoint.staging import Staging, as_bytes
from hetmesh.errors import CheckpointError, HetmeshError
from hetmesh.parallel.apply import Root
from hetmesh.records import checkpoint_folders as folders

T = TypeVar("T")

_PARTING = 30.0
"""Seconds that ranks, on their way out after an error, wait for each other to complete a save."""

_APPEARS = 60.0
"""Seconds that a rank looks for a file of another machine: network file systems remember for a while what was not
there."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        step: it holds the state after so many.
        held_s: seconds that this rank could not train for it.
        time_s: seconds from the beginning of the save until this rank knew that it was complete.
    """

    step: int
    held_s: float
    time_s: float


class Checkpointer:
    """Saves and loads the state of a run on every rank.

    A checkpoint holds the parameters and buffers of all modules (`model.<module>.<name>`), the optimizer's state by
    parameter name, the schedule, the data position, and each rank's random state. Loading needs the same modules and
    the same optimizer; nothing that is saved is left unread, except random states of ranks that no longer exist.

    Args:
        folder: where the step folders are.
        keep_latest: delete older ones beyond that many; 0 keeps all.
        timeout: seconds that writing or reading one may take; the timeout of a step does not count meanwhile.
        asynchronous: `save` copies the state into memory of the host and returns; a thread writes it. `check` after
            each step, and `wait` before the run ends.
        frozen_once: parameters that are not trained are in a file that all checkpoints of this run share.

    Attributes:
        plans: who writes what.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        keep_latest: int = 0,
        timeout: float = 3600.0,
        *,
        asynchronous: bool = False,
        frozen_once: bool = True,
    ) -> None:
        self.world, self.folder, self.keep_latest, self.timeout = world, folder, keep_latest, timeout
        self.asynchronous, self.frozen_once = asynchronous, frozen_once
        self.plans = SavePlans(world)
        self._staging, self._frozen = Staging(world.accelerator), FrozenFile()
        self._pending: PendingSave | None = None
        self._last: PendingSave | None = None  # that was waited for; it may still remove older ones
        self._saving, self._saved = Saved(0, 0.0, 0.0), deque[Saved]()  # `time_s` of the one: when it began

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return folders.complete_steps(self.folder)

    def prepare(self) -> None:
        """Make the folder, see that every rank can write there and that it is one folder, and remove what killed saves
        left. Collective; before hours of training.

        Raises:
            CheckpointError: they cannot, or it is not; on every rank.
        """
        told = f"checkpoints cannot be written to {self.folder}"
        with self.patience():
            file = self._on_first(told, lambda: folders.probe(self.folder))
        with self.patience(), self.world.waiting(f"whether all ranks can write to {self.folder}"):
            problem = self._first_told(folders.unusable(file, self.world.rank, min(_APPEARS, self.timeout)))
        if self.world.rank == 0:
            file.unlink(missing_ok=True)
        if problem:
            raise CheckpointError(f"{told}: {problem}")

    def latest(self) -> int | None:
        """The newest complete step, as rank 0 sees it, on every rank. Collective.

        Raises:
            CheckpointError: the folder cannot be read, or a newer checkpoint has lost its checksums; on every rank.
        """
        told = f"checkpoints in {self.folder} cannot be read"
        chosen = self._on_first(told, lambda: folders.newest_step(self.folder))
        return None if chosen < 0 else chosen

    def save(
        self,
        step: int,
        root: Root,
        optimizers: tuple[Any, Any] | None,
        extra: Mapping[str, Any],
        elsewhere: frozenset[str] = frozenset(),
    ) -> Path:
        """Write the state after `step` steps, once an earlier save is done. Collective.

        It gets its name when all is on the disk: what a crash or a full disk leaves is never taken for a checkpoint.
        Where saves are asynchronous that is later, and `check` or `wait` raise what goes wrong.

        Args:
            elsewhere: modules whose parameters and buffers are left out; equal on every rank.

        Raises:
            CheckpointError: it, or an earlier one, cannot be written; on every rank.
        """
        self.wait()
        began = time.perf_counter()
        path = self.folder / f"step-{step}"
        state = _without(elsewhere, self._state(root, optimizers, extra))
        with self.patience(), self.world.waiting(f"saving {path}"):
            entries = self.plans.share(state)
            try:
                partial = self._on_first(cannot_write(path), lambda: folders.make_partial(path))
            except CheckpointError as error:
                self._abandon(None, str(error))
            place = SavePlace(
                path, partial, self.world.rank, self.world.size, self.plans.metadata, self.keep_latest, self.timeout
            )
        fixed = {f"model.{name}" for name in frozen_names(root)} if self.frozen_once else set()
        changing = [entry for entry in entries if entry.index.fqn not in fixed]
        frozen = [entry for entry in entries if entry.index.fqn in fixed]
        fingerprint = fingerprint_of(frozen)
        # Now, for who would write them later cannot: frozen experts are on their way to other ranks then.
        linked = self._frozen.link(partial, path, file_names(self.world.rank)[1], fingerprint)
        if linked:
            frozen = []
        if self.asynchronous:
            if frozen:  # once, and where there are no links
                frozen = Staging(self.world.accelerator).copy(frozen)[0]
            copies, ready = self._staging.copy(changing)
        else:
            self.world.accelerator.synchronize()  # another thread reads what is computed here
            copies, ready = as_bytes(changing), self.world.accelerator.event()
            ready.record()
        self._pending = PendingSave(place, Content(copies, frozen, linked, fingerprint, self._frozen), ready)
        self._saving = Saved(step, time.perf_counter() - began, began)
        if not self.asynchronous:
            self.wait()
        return path

    def check(self) -> None:
        """Raise what has gone wrong with a save that goes on beside training. Collective, while there is one; waits for
        nothing but the other ranks' answer.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        if self._pending is not None:
            state = [float(bool(self._pending.error)), float(self._pending.running)]
            failed, running = reduce_over_ranks(state, self.world)
            if failed or not running:
                self.wait()

    def remove_old(self) -> None:
        """Remove what an earlier start has left that was killed between naming a checkpoint and removing older ones."""
        if self.world.rank == 0:
            with contextlib.suppress(OSError):  # they are no harm
                folders.remove_old(self.folder, self.keep_latest)

    def wait(self) -> None:
        """Wait until a save that goes on beside training is complete. Collective.

        Raises:
            CheckpointError: it cannot be written, or takes longer than the timeout; on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        path, began = pending.place.path, time.perf_counter()
        with self.patience(), self.world.waiting(f"writing {path}"):
            told = self._first_told(pending.wait_written())
            told = told or self._first_told(pending.wait_named() if self.world.rank == 0 else "")
            if told:
                self._abandon(pending.place.partial if pending.give_up() else None, told)
        self._last, saving, ended = pending, self._saving, time.perf_counter()
        self._saved.append(Saved(saving.step, saving.held_s + ended - began, ended - saving.time_s))

    def take_saved(self) -> Iterator[Saved]:
        """The checkpoints that have become complete since the last call."""
        while self._saved:
            yield self._saved.popleft()

    def close(self) -> None:
        """Let a save that goes on end, without other ranks, which may be gone: what an error is raised past. What does
        not end is said on standard error; it is no checkpoint."""
        pending, self._pending = self._pending, None
        if pending is not None and (told := pending.leave(_PARTING)):
            print(told, file=sys.stderr, flush=True)
        elif pending is not None:
            self._saved.append(replace(self._saving, time_s=time.perf_counter() - self._saving.time_s))
        if self._last is not None:
            self._last.end(_PARTING)

    def saved_run(self, step: int) -> RunState:
        """What the checkpoint of `step` says about its run. Collective.

        Raises:
            CheckpointError: it cannot be read, or holds the state after another step.
        """
        path = self.folder / f"step-{step}"
        with self.patience(), self._advising(step):
            found = saved_run(self.world, path)
        found.check_name(path)
        return found

    @contextlib.contextmanager
    def _advising(self, step: int) -> Iterator[None]:
        """For the body, which reads the checkpoint of `step`: its errors say how to go on."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {folders.advice(self.folder, step, str(error))}") from error

    def load(
        self,
        step: int,
        root: Root,
        optimizers: tuple[Any, Any] | None,
        extra: Mapping[str, Any],
        elsewhere: frozenset[str] = frozenset(),
    ) -> dict[str, Any]:
        """Read the state of `step` into modules and optimizers. Collective.

        Args:
            elsewhere: modules that the checkpoint does not hold and that have their weights.

        Returns:
            `extra` as it was saved.

        Raises:
            RecipeError: the checkpoint is of other modules or another optimizer; on every rank.
            CheckpointError: it cannot be read, or bytes have changed since it was written; on every rank. Tensors may
                have been overwritten then.
        """
        path = self.folder / f"step-{step}"
        with self.patience(), self._advising(step):
            index = opened(self.world, path)
            saved = index.saved
            whole = self._state(root, optimizers, extra)
            state = _without(elsewhere, whole)
            state = {k: v for k, v in state.items() if k in saved or not optional(k, saved)}
            check_fit(self.world, path, state, saved)
            read_into(self.world, path, state, index)
        root.load_state_dict(_under(whole | state, "model."))  # tensors are read in place
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

        with self.patience():
            self._on_first(fails, told)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """For the body, a rank waits for others as long as a checkpoint may take, and for the answer of one that gives
        up then: disks are no stalled peers."""
        usual = self.world.timeout
        self.world.set_timeout(self.timeout + usual)
        try:
            yield
        finally:
            self.world.set_timeout(usual)

    def _on_first(self, fails: str, action: Callable[[], T]) -> T:
        """What `action` gives on rank 0, on every rank. What goes wrong with it is the same error on every rank."""
        found: list[Any] = ["", None]
        if self.world.rank == 0:
            try:
                found[1] = action()
            except CheckpointError as error:
                found[0] = str(error)
            except OSError as error:
                found[0] = f"{fails}: {error}"
        with self.world.waiting(f"rank 0 at {self.folder}"):
            dist.broadcast_object_list(found, src=0, group=self._everyone)
        if found[0]:
            raise CheckpointError(found[0])
        answer: T = found[1]
        return answer

    def _first_told(self, told: str) -> str:
        """The first rank's text that is not empty, on every rank."""
        everybody: list[Any] = [None] * self.world.size
        dist.all_gather_object(everybody, told, group=self._everyone)
        return next(filter(None, everybody), "")

    def _abandon(self, partial: Path | None, told: str) -> NoReturn:
        """Remove what a failed save has written, and raise `told` on every rank, with what to do. Collective."""
        hint = [""]
        if self.world.rank == 0:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            hint = [self._what_to_do()]
        dist.broadcast_object_list(hint, src=0, group=self._everyone)
        raise CheckpointError(f"{told}{hint[0]}")

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


def _without(modules: frozenset[str], state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if not (k.startswith("model.") and k.split(".")[1] in modules)}


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
