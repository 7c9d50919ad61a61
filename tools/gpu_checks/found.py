"""Values of the list: where checks run, what one found, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

DEVICES = ("cuda", "cpu", "fake")
Status = Literal["passed", "failed", "skipped"]


class Skip(Exception):
    """Why a check says nothing where it runs."""


@dataclass(frozen=True)
class Place:
    """Where checks run.

    Attributes:
        device: `cuda`, `cpu` (ranks over gloo) or `fake` (what a dry run can say).
        gpus: CUDA devices of this machine.
        steps: measured steps of each loop, where times are taken.
    """

    device: str
    gpus: int = 0
    steps: int = 10

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to check."""
        return self.device == "cuda"

    def need_kernels(self, what: str) -> None:
        """Raise Skip where nothing is computed."""
        if self.device == "fake":
            raise Skip(f"{what}: a fake accelerator computes no values and takes no time")


@dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes:
        figures: JSON.
        at_most: the most that some of the figures may be.
        left_out: parts that were not tried here, with the reason.
    """

    figures: Mapping[str, Any]
    at_most: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def broken(self) -> list[str]:
        """The figures that are above what they may be, or missing, in words."""
        found = []
        for name, most in self.at_most.items():
            value = self.figures.get(name)
            if not isinstance(value, int | float) or math.isnan(value):
                found.append(f"{name} is {value}, which is no number")
            elif value > most:
                found.append(f"{name} is {value:.4g}, at most {most:.4g} is allowed")
        return found


@dataclass(frozen=True)
class Row:
    """A check in the result.

    Attributes:
        reason: why it failed or was skipped; empty where it passed.
        seconds: that it took, its process included.
    """

    name: str
    status: Status
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, found: Found) -> Row:
        """Passed where all figures are as small as they must be."""
        broken = found.broken()
        given = (found.figures, found.at_most, found.left_out)
        return cls(name, "failed" if broken else "passed", "; ".join(broken), *given)

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "seconds": round(self.seconds, 1)}

    def line(self) -> str:
        """For people."""
        judged = [f"{name} {_short(self.figures.get(name))} (at most {_short(m)})" for name, m in self.at_most.items()]
        told = [self.reason] if self.reason else judged
        told += [f"not tried: {what} ({why})" for what, why in self.left_out.items()]
        return f"{self.name}: {self.status} ({self.seconds:.0f} s){': ' if told else ''}{'; '.join(told)}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
