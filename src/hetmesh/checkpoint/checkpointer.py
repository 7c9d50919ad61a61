"""Checkpoints: torch's DCP, one folder per step, every rank writing what it owns. Resume is exact."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects, reduce_over_ranks
from hetmesh.checkpoint.fit import MODEL, OPTIMIZER_STATE, check_fit, module_of, optional
from hetmesh.checkpoint.reading import read_index, read_into
from hetmesh.checkpoint.resume import RunState, read_run
from hetmesh.checkpoint.save_plan import SavePlans
from hetmesh.checkpoint.saving import PendingSave, SavePlace
from hetmesh.checkpoint.writing import FrozenFile, fingerprint_of, write_file
from hetmesh.errors import CheckpointError, HetmeshError
from hetmesh.parallel.apply import Root
from hetmesh.records import checkpoint_folders as folders

T = TypeVar("T")
Optimizers = tuple[Any, Any] | None
"""torchtitan's containers of optimizers and of schedulers."""

_EXIT_TIMEOUT_S = 30.0
"""Seconds that ranks that leave after an error wait for each other to complete a save."""

_VISIBLE_TIMEOUT_S = 60.0
"""Seconds until a rank sees a file of another machine: network file systems cache for a while that it is missing."""


class Checkpointer:
    """Saves and loads the state of a run on every rank.

    A checkpoint holds the parameters and buffers of all modules (`model.<module>.<name>`), the optimizer's state by
    parameter name, the schedule, the data position, and each rank's random state. Loading needs the same modules and
    the same optimizer; nothing that is saved is left unread, except random states of ranks that no longer exist.

    Methods are collective, and their errors the same on every rank, except for `steps`, `remove_old` and `close`.

    Args:
        folder: of the step folders.
        keep_latest: delete older ones beyond that number; 0 keeps all.
        timeout: seconds that writing or reading one may take; the timeout of a step does not count meanwhile.
        asynchronous: `save` copies the state into memory of the host and returns; a thread writes it. `check` after
            each step, and `wait` before the run ends.
        frozen_once: parameters that are not trained are in a file that all checkpoints of this run share.

    Attributes:
        on_saved: called when a checkpoint is complete, with its step, the seconds that this rank could not train for
            it, and those from the beginning of the save until this rank knew that it was complete.
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
        self._frozen = FrozenFile()
        self._pending: PendingSave | None = None
        self._last: PendingSave | None = None  # that was waited for; it may still remove older ones
        self._step, self._began, self._held_s = 0, 0.0, 0.0  # of the pending save
        self.on_saved: Callable[[int, float, float], None] = lambda step, held_s, time_s: None

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return folders.complete_steps(self.folder)

    def prepare(self) -> None:
        """Make the folder, see that every rank can write there and that it is one folder, and remove what killed saves
        left: before hours of training. Raises CheckpointError."""
        fails = f"checkpoints cannot be written to {self.folder}"
        with self.patience():
            file = self._on_first(fails, lambda: folders.probe(self.folder))
        with self.patience(), self.world.waiting(f"whether all ranks can write to {self.folder}"):
            problem = self._first_text(folders.unusable(file, self.world.rank, min(_VISIBLE_TIMEOUT_S, self.timeout)))
        if self.world.rank == 0:
            file.unlink(missing_ok=True)
        if problem:
            raise CheckpointError(f"{fails}: {problem}")

    def save(
        self, step: int, root: Root, optimizers: Optimizers, extra: Mapping[str, Any], elsewhere: Collection[str] = ()
    ) -> Path:
        """Write the state after `step` steps, once an earlier save is done; returns its folder.

        It gets its name when it is on the disk: what a crash or a full disk leaves is never taken for a checkpoint.
        Where saves are asynchronous that is later, and `check` or `wait` raise errors.

        Args:
            elsewhere: modules whose parameters and buffers are left out; equal on every rank.

        Raises:
            CheckpointError: it, or an earlier one, cannot be written.
        """
        self.wait()
        began = time.perf_counter()
        path = self.folder / f"step-{step}"
        with _nothing_made_up(optimizers[0].optimizers if optimizers is not None else ()):
            state = _without(elsewhere, self._state(root, optimizers, extra))
        with self.patience(), self.world.waiting(f"saving {path}"):
            items, planner = self.plans.share(state)
            try:
                fails = f"checkpoint {path} cannot be written"
                partial = self._on_first(fails, lambda: folders.make_partial(path))
            except CheckpointError as error:
                self._abandon(None, str(error))
        rank, size, metadata = self.world.rank, self.world.size, self.plans.metadata
        place = SavePlace(path, partial, rank, size, metadata, self.keep_latest, self.timeout)
        parameters = root.named_parameters(remove_duplicate=False) if self.frozen_once else ()
        names = {f"{MODEL}{name}" for name, parameter in parameters if not parameter.requires_grad}
        changing = [item for item in items if item.index.fqn not in names]
        frozen = [item for item in items if item.index.fqn in names]
        fingerprint = fingerprint_of(planner.lookup_object(item.index) for item in frozen)
        # Now, since later these values may be gone: frozen experts move to other ranks.
        linked = self._frozen.link(partial, path, fingerprint)
        frozen = [] if linked else frozen  # written once, and where there are no links
        accelerator = self.world.accelerator
        if not self.asynchronous:
            accelerator.synchronize()  # another thread reads what is computed here
        planner.hold([*changing, *frozen], accelerator.empty_pinned if self.asynchronous else None)
        ready = accelerator.event()
        ready.record()

        def write() -> list[WriteResult]:
            written = write_file(partial, f"__{rank}_", changing, planner)
            once = write_file(partial, f"__{rank}_frozen_", frozen, planner)
            self._frozen.keep(path, fingerprint, once)
            return [*written, *once, *linked]

        self._pending = PendingSave(place, write, ready)
        self._step, self._began, self._held_s = step, began, time.perf_counter() - began
        if not self.asynchronous:
            self.wait()
        return path

    def check(self) -> None:
        """Raise the CheckpointError of a save beside training, if any; waits only for the other ranks' answer."""
        if self._pending is not None:
            state = [float(bool(self._pending.error)), float(self._pending.running)]
            failed, running = reduce_over_ranks(state, self.world)
            if failed or not running:
                self.wait()

    def remove_old(self) -> None:
        """Remove what an earlier start left that was killed between naming a checkpoint and removing older ones."""
        if self.world.rank == 0:
            with contextlib.suppress(OSError):  # they do no harm
                folders.remove_old(self.folder, self.keep_latest)

    def wait(self) -> None:
        """Wait until a save beside training is complete. Raises CheckpointError: it cannot be written in time."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        path, began = pending.place.path, time.perf_counter()
        with self.patience(), self.world.waiting(f"writing {path}"):
            error = self._first_text(pending.wait_written())
            error = error or self._first_text(pending.wait_named() if self.world.rank == 0 else "")
            if error:
                self._abandon(pending.place.partial if pending.give_up() else None, error)
        self._last, ended = pending, time.perf_counter()
        self.on_saved(self._step, self._held_s + ended - began, ended - self._began)

    def close(self) -> None:
        """Wait for a save beside training without other ranks, which may be gone: after an error. A save that fails is
        no checkpoint, and named on standard error."""
        pending, self._pending = self._pending, None
        if pending is not None and (error := pending.leave(_EXIT_TIMEOUT_S)):
            print(error, file=sys.stderr, flush=True)
        elif pending is not None:
            self.on_saved(self._step, self._held_s, time.perf_counter() - self._began)
        if self._last is not None:
            self._last.end(_EXIT_TIMEOUT_S)

    def saved_run(self, step: int) -> RunState:
        """What the checkpoint of `step` says about its run. Raises CheckpointError: it cannot be read, or holds the
        state after another step."""
        path = self.folder / f"step-{step}"
        with self._advising(step):
            _, run = read_run(self.world, path)
        run.check_name(path)
        return run

    @contextlib.contextmanager
    def _advising(self, step: int) -> Iterator[None]:
        """Errors of the body, which reads the checkpoint of `step`, say how to go on."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {folders.advice(self.folder, step, str(error))}") from error

    def load(
        self, step: int, root: Root, optimizers: Optimizers, extra: Mapping[str, Any], elsewhere: Collection[str] = ()
    ) -> dict[str, Any]:
        """Read the state of `step` into modules and optimizers; returns `extra` as it was saved.

        Args:
            elsewhere: modules that the checkpoint does not hold and that have their weights.

        Raises:
            RecipeError: the checkpoint is of other modules or another optimizer.
            CheckpointError: it cannot be read, or has changed since it was written; tensors may be overwritten then.
        """
        path = self.folder / f"step-{step}"
        with self.patience(), self._advising(step):
            index = read_index(self.world, path)
            saved = index.saved
            everything = self._state(root, optimizers, extra)
            state = _without(elsewhere, everything)
            state = {k: v for k, v in state.items() if k in saved or not optional(k, saved)}
            check_fit(self.world, path, state, saved)
            read_into(self.world, path, state, index)
        root.load_state_dict(_under(everything | state, MODEL))  # tensors are read in place
        if optimizers is not None:
            optimizers[0].load_state_dict(_under(state, "optimizer."))
            _forget_made_up(optimizers[0].optimizers, state)
            with warnings.catch_warnings():  # torchtitan's scheduler asks torch's for its rate in a frowned-upon way
                warnings.simplefilter("ignore", UserWarning)
                optimizers[1].load_state_dict(_under(state, "lr_scheduler."))
        random, device = _under(state, f"random.{self.world.rank}."), self.world.accelerator.device
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if (module := self.world.accelerator.random_module) is not None and device.type in random:
            module.set_rng_state(random[device.type], device)
        return _under(state, "extra.")

    def on_first_rank(self, fails: str, action: Callable[[], object]) -> None:
        """Do `action` on rank 0, which may take as long as saving; its HetmeshError becomes a CheckpointError."""

        def checked() -> None:
            try:
                action()
            except HetmeshError as error:
                raise CheckpointError(f"{fails}: {error}") from error

        with self.patience():
            self._on_first(fails, checked)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """In the body a rank waits for others as long as a checkpoint may take, and for the answer of one that gives up
        then: a slow disk is no stalled peer."""
        usual = self.world.timeout
        self.world.set_timeout(self.timeout + usual)
        try:
            yield
        finally:
            self.world.set_timeout(usual)

    def _on_first(self, fails: str, action: Callable[[], T]) -> T:
        """What `action` returns on rank 0, on every rank; its error is the same on every rank."""
        error, result = "", None
        if self.world.rank == 0:
            try:
                result = action()
            except CheckpointError as problem:
                error = str(problem)
            except OSError as problem:
                error = f"{fails}: {problem}"
        with self.world.waiting(f"rank 0 at {self.folder}"):
            error, result = self._from_first((error, result))
        if error:
            raise CheckpointError(error)
        return result  # type: ignore[return-value]

    def _from_first(self, value: T) -> T:
        """`value` of rank 0, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.world.group(range(self.world.size)))
        return values[0]

    def _first_text(self, text: str) -> str:
        """The first rank's text that is not empty, on every rank."""
        return next(filter(None, gather_objects(text, self.world)), "")

    def _abandon(self, partial: Path | None, error: str) -> NoReturn:
        """Remove the files of a failed save, and raise `error` on every rank, with what to do. Collective."""
        if self.world.rank == 0 and partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{error}{self._from_first(self._what_to_do() if self.world.rank == 0 else '')}")

    def _what_to_do(self) -> str:
        try:
            free, steps = f"{shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB", self.steps()
        except OSError:
            return "; set job.dump_folder to a folder that can be written"
        newest = f"; the newest complete one is step-{steps[-1]}" if steps else ""
        return f"; {free} are free there: make room, or set job.dump_folder to another disk{newest}"

    def _state(self, root: Root, optimizers: Optimizers, extra: Mapping[str, Any]) -> dict[str, Any]:
        parts = [(MODEL, root.state_dict()), ("extra.", extra)]
        if optimizers is not None:
            parts[1:1] = zip(("optimizer.", "lr_scheduler."), (part.state_dict() for part in optimizers), strict=True)
        state = {f"{prefix}{key}": value for prefix, values in parts for key, value in values.items()}
        state[f"random.{self.world.rank}.cpu"] = torch.get_rng_state()
        device = self.world.accelerator.device
        if (module := self.world.accelerator.random_module) is not None:
            state[f"random.{self.world.rank}.{device.type}"] = module.get_rng_state(device)
        return state


def _without(modules: Collection[str], state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if not (k.startswith(MODEL) and module_of(k) in modules)}


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _forget_made_up(optimizers: Iterable[torch.optim.Optimizer], state: Mapping[str, Any]) -> None:
    """Drop what optimizers hold of parameters of which `state` holds nothing, since they never had a gradient: torch
    steps once to make the tensors that it loads into, and keeps the others."""
    saved = {key.rpartition(".")[0] for key in state}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter, name in zip(group["params"], group["param_names"], strict=True):
                if f"{OPTIMIZER_STATE}{name}" not in saved:
                    optimizer.state.pop(parameter, None)


@contextlib.contextmanager
def _nothing_made_up(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """In the body optimizers without any state seem to have some: torch steps others once when it is asked for their
    state, which then begins with another step count than in a run that saves nothing."""
    bare = [optimizer for optimizer in optimizers if not optimizer.state]
    for optimizer in bare:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {}
    try:
        yield
    finally:
        for optimizer in bare:
            optimizer.state.clear()
