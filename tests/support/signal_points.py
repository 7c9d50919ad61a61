"""Signals at points of a run that are always the same: a kill inside a save, a SIGTERM in the middle of a step."""

from __future__ import annotations

import functools
import importlib
import os
import signal
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class SignalPoint:
    """A signal that comes where `rank` calls a function.

    Attributes:
        function: `package.module:name` by which its caller looks it up, e.g. `hetmesh.training.validation:evaluate`.
        rank: of torchrun's variables; 0 where they are not set.
        call: which of the rank's calls it is, counted from 1.
        after: when the function has returned, rather than before it begins.
        number: the signal.
        to: the process of that rank, its process group, or the process that started it.
    """

    function: str
    rank: int = 0
    call: int = 1
    after: bool = False
    number: signal.Signals = signal.SIGKILL
    to: Literal["rank", "group", "parent"] = "rank"

    def install(self) -> None:
        """Put it into this process and those that it forks from now on."""
        module, _, name = self.function.partition(":")
        *path, name = name.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(module))
        function, calls = getattr(owner, name), 0

        @functools.wraps(function)
        def struck(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            now = calls == self.call and int(os.environ.get("RANK", 0)) == self.rank
            if now and not self.after:
                self._send()
            found = function(*args, **kwargs)
            if now and self.after:
                self._send()
            return found

        setattr(owner, name, struck)

    def _send(self) -> None:
        if self.to == "group":
            os.killpg(os.getpgrp(), self.number)
        else:
            os.kill(os.getpid() if self.to == "rank" else os.getppid(), self.number)
