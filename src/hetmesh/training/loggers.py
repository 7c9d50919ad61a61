"""TensorBoard and Weights & Biases, both torchtitan's, behind one call."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetmesh import _titan
from hetmesh.errors import RecipeError


class Loggers:
    """Takes scalars and hands them to the loggers that the recipe switched on.

    Args:
        folder: the run's dump folder.
        config: what Weights & Biases shows as the run's configuration.

    Raises:
        RecipeError: `wandb` is wanted but not installed.
    """

    def __init__(
        self, folder: Path, *, tensorboard: bool = False, wandb: bool = False, config: Mapping[str, Any] | None = None
    ) -> None:
        self._loggers: list[Any] = []
        if tensorboard:
            self._loggers.append(_titan.tensorboard_logger()(str(folder / "tensorboard"), None))
        if wandb:
            self._loggers.append(_wandb(folder, dict(config or {})))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log some scalars of one step."""
        for logger in self._loggers:
            logger.log(dict(values), step)

    def close(self) -> None:
        """Flush and close all of them."""
        for logger in self._loggers:
            logger.close()


def require_wandb() -> None:
    """Raise RecipeError unless wandb is installed."""
    if importlib.util.find_spec("wandb") is None:
        raise RecipeError("metrics.enable_wandb = true: wandb is not installed; pip install wandb, or set it to false")


def _wandb(folder: Path, config: dict[str, Any]) -> Any:
    require_wandb()
    os.environ.setdefault("WANDB_PROJECT", "hetmesh")
    if "WANDB_MODE" not in os.environ and not _logged_in():
        os.environ["WANDB_MODE"] = "offline"  # otherwise it asks for a key; `wandb sync` uploads the run later
    try:
        return _titan.wandb_logger()(str(folder / "wandb"), config)
    except Exception:
        if os.environ.get("WANDB_MODE") == "offline":
            raise
        os.environ["WANDB_MODE"] = "offline"  # a run should not fail because a web server cannot be reached
        return _titan.wandb_logger()(str(folder / "wandb"), config)


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
