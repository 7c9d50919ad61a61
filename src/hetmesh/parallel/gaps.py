"""Gaps: where a rank waits for a collective of tensor or sequence parallelism, and may lend itself to other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetmesh.boundary.collective_clock import timed_collective

Lend = Callable[[Callable[[], bool]], None]
"""Does other work until the condition holds, or there is none left."""

_lend: Lend | None = None  # of the process: it knows in which thread it may lend


@dataclass
class GapTime:
    """Seconds in collectives that may lend, and of these in which they did."""

    gap_s: float = 0.0
    lent_s: float = 0.0


_time = GapTime()


@contextmanager
def lending(lend: Lend) -> Iterator[GapTime]:
    """Collectives of the body call `lend` while they wait. Yields what they add to."""
    global _lend, _time
    before, _lend, _time = _lend, lend, GapTime()
    try:
        yield _time
    finally:
        _lend = before


def collective(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run `begin`, a collective of torch.distributed, with these arguments, and wait for it: every one of tensor and
    sequence parallelism passes here, in a forward, in a backward, and where a forward is computed again."""
    with timed_collective():
        if _lend is None:
            begin(*args, **kwargs)
            return
        work = begin(*args, **kwargs, async_op=True)
        started = time.perf_counter()
        _lend(work.is_completed)
        _time.lent_s += time.perf_counter() - started
        work.wait()
        _time.gap_s += time.perf_counter() - started
