"""Checkpoints: torch's DCP, one folder per step, every rank writing what it owns. Resume is exact."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.training.optimizers import Root

_STEP = re.compile(r"step-(\d+)")
_COMPLETE = ".metadata"  # DCP writes it last, so a folder without it is what a killed run left behind


class Checkpointer:
    """Saves and loads the state of a run on every rank.

    A checkpoint holds the parameters and buffers of all modules (`model.<module>.<name>`), the optimizer's state by
    parameter name, the schedule, the data position, and each rank's random state. Loading needs the same modules; the
    random state is restored on ranks that had one.

    Args:
        folder: where the step folders are.
        keep_latest: delete older ones beyond that many; 0 keeps all.
    """

    def __init__(self, world: World, folder: Path, keep_latest: int = 0) -> None:
        self.world, self.folder, self.keep_latest = world, folder, keep_latest

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = ((_STEP.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(int(m.group(1)) for m, path in found if m and (path / _COMPLETE).is_file())

    def latest(self) -> int | None:
        """The newest complete step, as rank 0 sees it, on every rank. Collective."""
        steps = self.steps()
        chosen = torch.tensor([steps[-1] if steps else -1], device=self.world.device)
        dist.broadcast(chosen, src=0, group=self.world.group(range(self.world.size)))
        return None if chosen.item() < 0 else int(chosen.item())

    def save(self, step: int, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps. Collective."""
        path = self.folder / f"step-{step}"
        with self.world.watchdog.watching(f"checkpoint of step {step}"):
            dcp.save(self._state(root, optimizers, extra), checkpoint_id=str(path))
        if self.world.rank == 0 and self.keep_latest:
            for old in self.steps()[: -self.keep_latest]:
                shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)
        return path

    def load(
        self, step: int, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Read the state of `step` into modules and optimizers. Collective.

        Returns:
            `extra` as it was saved.

        Raises:
            RecipeError: the checkpoint is of other modules.
        """
        path = self.folder / f"step-{step}"
        state = self._state(root, optimizers, extra)
        try:
            dcp.load(state, checkpoint_id=str(path))
        except Exception as error:
            raise RecipeError(f"checkpoint {path} does not fit this recipe: {error}") from error
        root.load_state_dict(_under(state, "model."), strict=False)
        if optimizers is not None:
            optimizers[0].load_state_dict(_under(state, "optimizer."))
            optimizers[1].load_state_dict(_under(state, "lr_scheduler."))
        if self._random_key in state:
            torch.set_rng_state(state[self._random_key])
        return _under(state, "extra.")

    @property
    def _random_key(self) -> str:
        return f"random.{self.world.rank}"

    def _state(self, root: Root, optimizers: tuple[Any, Any] | None, extra: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {f"model.{k}": v for k, v in root.state_dict().items()}
        if optimizers is not None:
            state |= {f"optimizer.{k}": v for k, v in optimizers[0].state_dict().items()}
            state |= {f"lr_scheduler.{k}": v for k, v in optimizers[1].state_dict().items()}
        state |= {f"extra.{k}": v for k, v in extra.items()}
        state[self._random_key] = torch.get_rng_state()
        return state


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
