"""HostWaits: where a host would have to wait for its device, by source line."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import hetmesh

Direction = Literal["device_to_host", "host_to_device"]

_OURS = str(Path(hetmesh.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_HARNESS = tuple(
    os.path.join(_OURS, *name.split("/"))
    for name in (
        *("dryrun/fake_tensors.py", "dryrun/fake_kernels.py", "dryrun/fake_device.py", "dryrun/host_waits.py"),
        "runtime/live_bytes.py",
    )
)


@dataclass(frozen=True)
class HostWait:
    """A line at which the host waits.

    Attributes:
        direction: of the copy that it waits for.
        what: the operation.
        line: the innermost line of hetmesh, as `training/trainer.py:12`; empty where there is none.
        model: the innermost line outside of torch and hetmesh that is further in; empty where there is none.
        during: what was going on, such as an action of the schedule.
        within: whether that was an action.
    """

    direction: Direction
    what: str
    line: str
    model: str
    during: object
    within: bool


class HostWaits:
    """Counts where the host waits.

    Attributes:
        counts: how often each occurred.
        during: what is going on now.
    """

    def __init__(self) -> None:
        self.counts: Counter[HostWait] = Counter()
        self.during: object = ""

    def device_to_host(self, what: str) -> None:
        """The host waits for a value of the device."""
        self._count("device_to_host", what)

    def host_to_device(self, what: str) -> None:
        """The host waits until the device has what it gives."""
        self._count("host_to_device", what)

    def _count(self, direction: Direction, what: str) -> None:
        self.counts[HostWait(direction, what, *_lines(), self.during, not isinstance(self.during, str))] += 1

    def place(self) -> str:
        """The lines that are running, in words."""
        line, model = _lines()
        return ", called by ".join(filter(None, (model, line))) or "torch's backward"


def listing() -> int:
    """In how many calls of FakeTensor's `tolist` inside each other the caller is: it takes elements one by one, where a
    real one is copied to the host once."""
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS) and not code.co_filename.startswith(_HARNESS):
            break
        depth += code.co_name == "tolist" and code.co_filename.startswith(_TORCH)
        frame = frame.f_back  # type: ignore[assignment]
    return depth


def _lines() -> tuple[str, str]:
    frame, model = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            if name not in _HARNESS:
                return f"{name.removeprefix(_OURS)}:{frame.f_lineno}", model
        elif not model and not name.startswith((_TORCH, "<")):
            model = f"{name.rpartition('site-packages' + os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "", model
