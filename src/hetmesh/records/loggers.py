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
from hetmesh.files import writing


class Loggers:
    """Takes scalars and hands them to the loggers that the recipe switched on.

    Args:
        folder: the run's dump folder.
        config: what Weights & Biases shows as the run's configuration.
        resumed_at: steps done by earlier runs; what TensorBoard has of later ones is hidden, it will come again.

    Raises:
        RecipeError: `wandb` is wanted but not installed.
        OutputError: something cannot be written. So do all methods.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = False,
        wandb: bool = False,
        config: Mapping[str, Any] | None = None,
        resumed_at: int = 0,
    ) -> None:
        self.folder = folder
        self._loggers: list[Any] = []
        if tensorboard:
            with writing(folder / "tensorboard"):
                logger = _titan.tensorboard_logger()(str(folder / "tensorboard"), None)
                if resumed_at:
                    _hide_after(logger, resumed_at)
            self._loggers.append(logger)
        if wandb:
            self._loggers.append(_wandb(folder, dict(config or {})))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log some scalars of one step."""
        with writing(f"{self.folder}: a logger's files"):
            for logger in self._loggers:
                logger.log(dict(values), step)

    def close(self) -> None:
        """Flush and close all of them."""
        with writing(f"{self.folder}: a logger's files"):
            for logger in self._loggers:
                logger.close()


def _hide_after(logger: Any, step: int) -> None:
    """Tell TensorBoard that events after `step` in older files of this folder are void."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    writer = logger.writer.file_writer
    writer.add_event(Event(file_version="brain.Event:2"), step + 1)
    writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step + 1)


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
