"""When this rank was in collectives inside its modules, while a step is recorded; costs nothing otherwise.

The functions that run collectives say so (`timed_collective`): tensor and sequence parallelism, FSDP, and whoever waits
for keys or for routed tokens (`Exchange`, `World.waiting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_clock: CollectiveClock | None = None  # of the process: autograd has threads of its own on GPUs


class CollectiveClock:
    """Notes the collectives of this process.

    Args:
        now: a point in time: an event on the current stream.

    Attributes:
        spans: whether parameters were gathered, start and stop of each collective; of nested ones the outermost.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now, self.inside = now, False
        self.spans: list[tuple[bool, Any, Any]] = []

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Collectives of the body are noted."""
        global _clock
        _clock = self
        try:
            yield
        finally:
            _clock = None

    @contextmanager
    def collective(self, gathers: bool) -> Iterator[None]:
        """The body is a collective."""
        started, self.inside = self.now(), True
        try:
            yield
        finally:
            self.inside = False
            self.spans.append((gathers, started, self.now()))


def timed_collective(*, gathers: bool = False) -> AbstractContextManager[None]:
    """The body is a collective, or a wait for one. `gathers`: whether it gathers parameters (FSDP)."""
    return nullcontext() if _clock is None or _clock.inside else _clock.collective(gathers)
