"""Checkpoints: torch's DCP, one folder per step, every rank writing what it owns. Resume is exact."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.training.optimizers import Root

_STEP = re.compile(r"step-(\d+)")
COMPLETE = ".metadata"  # DCP writes it last, so a folder without it is what a killed run left behind
_SHOWN = 3  # differences that an error names


class Checkpointer:
    """Saves and loads the state of a run on every rank.

    A checkpoint holds the parameters and buffers of all modules (`model.<module>.<name>`), the optimizer's state by
    parameter name, the schedule, the data position, and each rank's random state. Loading needs the same modules and
    the same optimizer; nothing that is saved is left unread, except random states of ranks that no longer exist.

    Args:
        folder: where the step folders are.
        keep_latest: delete older ones beyond that many; 0 keeps all.
    """

    def __init__(self, world: World, folder: Path, keep_latest: int = 0) -> None:
        self.world, self.folder, self.keep_latest = world, folder, keep_latest

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return complete_steps(self.folder)

    def latest(self) -> int | None:
        """The newest complete step, as rank 0 sees it, on every rank. Collective."""
        steps = self.steps()
        chosen = torch.tensor([steps[-1] if steps else -1], device=self.world.device)
        with self.world.waiting("choice of the checkpoint to resume from"):
            dist.broadcast(chosen, src=0, group=self._everyone)
        return None if chosen.item() < 0 else int(chosen.item())

    def save(self, step: int, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps. Collective.

        Raises:
            OSError: it cannot be written; on every rank.
        """
        path = self.folder / f"step-{step}"
        try:
            with self.world.waiting(f"saving {path}"):
                state = self._state(root, optimizers, extra)
                dcp.save(state, checkpoint_id=str(path), process_group=self._everyone)
        except CheckpointException as error:  # no Exception: it would pass by everything that handles failures
            raise OSError(f"checkpoint {path} cannot be written: {first_cause(error)}") from error
        if self.world.rank == 0 and self.keep_latest:
            for old in self.steps()[: -self.keep_latest]:
                (self.folder / f"step-{old}" / COMPLETE).unlink()  # first: a folder that is half gone is not complete
                shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)
        return path

    def load(
        self, step: int, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Read the state of `step` into modules and optimizers. Collective.

        Returns:
            `extra` as it was saved.

        Raises:
            RecipeError: the checkpoint is of other modules or another optimizer, or cannot be read; on every rank.
        """
        path = self.folder / f"step-{step}"
        saved = saved_tensors(path)
        state = {k: v for k, v in self._state(root, optimizers, extra).items() if k in saved or not _optional(k, saved)}
        self._check_fit(path, state, saved)
        try:
            with self.world.waiting(f"loading {path}"):
                dcp.load(state, checkpoint_id=str(path), process_group=self._everyone)
        except CheckpointException as error:
            raise RecipeError(f"checkpoint {path} cannot be read: {first_cause(error)}") from error
        root.load_state_dict(_under(state, "model."))
        if optimizers is not None:
            optimizers[0].load_state_dict(_under(state, "optimizer."))
            with warnings.catch_warnings():  # torchtitan's scheduler asks torch's for its rate in a frowned-upon way
                warnings.simplefilter("ignore", UserWarning)
                optimizers[1].load_state_dict(_under(state, "lr_scheduler."))
        random = _under(state, f"random.{self.world.rank}.")
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if "cuda" in random and self.world.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.world.device)
        return _under(state, "extra.")

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
        if self.world.device.type == "cuda":
            state[f"random.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.world.device)
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
    """Steps with a complete checkpoint in `folder`, ascending."""
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(m.group(1)) for m, path in found if m and (path / COMPLETE).is_file())


def saved_value(path: Path, key: str) -> Any:
    """One saved value that is no tensor; None if the checkpoint has none of that name. Not collective."""
    if f"extra.{key}" not in saved_tensors(path):
        return None
    state: dict[str, Any] = {f"extra.{key}": None}
    with warnings.catch_warnings():  # that this is done by one process is meant so
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state[f"extra.{key}"]


def saved_tensors(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name."""
    try:
        return FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling makes of a damaged file
        raise RecipeError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


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
