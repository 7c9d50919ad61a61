"""Payloads: samples loaded in this process, when they are asked for; `workers` loads them ahead of need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from hetmesh.data.source import Sample, Source
from hetmesh.errors import SampleError


@dataclass(frozen=True, slots=True)
class Wanted:
    """A payload to load: the split and index of a sample, and the kinds of media that are wanted (None: all)."""

    split: str
    index: int
    kinds: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What comes in place of a sample that cannot be read: why."""

    message: str


Payload = Sample | Unreadable


class SplitSources:
    """The sources of a run by split, each made when it is first used. Pickled, it makes them anew. `reading` is held
    while a source is asked for something: sources need not be safe for threads, and another one plans the next step."""

    def __init__(self, makers: Mapping[str, Callable[[], Source]]) -> None:
        self.reading = threading.RLock()
        self.splits = tuple(makers)
        self._makers = dict(makers)
        self._made: dict[str, Source] = {}

    def __getitem__(self, split: str) -> Source:
        if split not in self._made:
            self._made[split] = self._makers[split]()
        return self._made[split]

    def made(self, split: str) -> Source | None:
        """The source of `split`, if it was made; None otherwise."""
        return self._made.get(split)

    def __getstate__(self) -> dict[str, Any]:
        return {"splits": self.splits, "_makers": self._makers, "_made": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__ |= {**state, "reading": threading.RLock()}

    def load(self, wanted: Wanted) -> Payload:
        """One sample, or why it cannot be read."""
        with self.reading:
            source, started = self[wanted.split], time.perf_counter()
            try:
                sample = source.load(wanted.index, wanted.kinds)
            except SampleError as error:
                return Unreadable(str(error))
            return replace(sample, load_s=time.perf_counter() - started)


class Payloads:
    """Loads samples, in this process, when they are asked for. Used as a context: leaving it ends what was started."""

    def __init__(self, sources: SplitSources) -> None:
        self.sources = sources

    def announce(self, requests: Sequence[Sequence[Wanted]]) -> None:
        """What will be asked for, in about that order, after all that was announced before."""

    def when_idle(self, more: Callable[[], None]) -> None:
        """Call `more`, which may announce what comes next, whenever all that was announced is on its way."""

    def get(self, wanted: Sequence[Wanted]) -> list[Payload]:
        """Load, or wait until it is loaded."""
        return [self.sources.load(request) for request in wanted]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
