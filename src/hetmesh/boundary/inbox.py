"""Inbox: short records from other processes of this host, through a pipe that they open by its path.

A pipe wakes the thread that waits for it, and nobody else: a message of gloo wakes a thread on each side besides, and
asks first whether it is expected. That costs several times what it takes to copy a message of 24 KB.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from hetmesh.boundary.shared_memory import Slot, path

_RECORD = struct.Struct("6q")
_READ = _RECORD.size * (2**16 // _RECORD.size)  # whole records: each is written at once, so none is cut
_LONG = timedelta(days=365)
_PATIENCE = 20  # ms between looks into the own inbox while another one is full


@dataclass(frozen=True, slots=True)
class Letter:
    """What one rank tells another: here is the message of `tag`, of so many elements."""

    source: int
    tag: int
    slot: Slot
    numel: int


class Inbox:
    """Letters to this process, kept until they are asked for. Those of one sender with one tag keep their order."""

    def __init__(self) -> None:
        self._read, self.file = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._letters: dict[tuple[int, int], deque[Letter]] = {}
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def collect(self) -> None:
        """Take in what has come, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, _READ):
                for source, tag, file, slab, place, numel in _RECORD.iter_unpack(data):
                    letter = Letter(source, tag, Slot(file, slab, place), numel)
                    self._letters.setdefault((source, tag), deque()).append(letter)
                if len(data) < _READ:
                    return

    def find(self, source: int, tag: int) -> Letter | None:
        """The oldest letter of `source` with `tag` that has been collected, which leaves the inbox."""
        waiting = self._letters.get((source, tag))
        if not waiting:
            return None
        letter = waiting.popleft()
        if not waiting:
            del self._letters[source, tag]
        return letter

    def wait(self, source: int, tag: int, timeout: float, life: int | None) -> Letter:
        """Wait for a letter.

        Args:
            timeout: seconds.
            life: a file that can be read once the process of `source` has ended.

        Raises:
            RuntimeError: it did not come in time, or the other process ended without sending it.
        """
        until = time.monotonic() + timeout
        poll = self._poll
        if life is not None:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.register(life, select.POLLIN)
        while (letter := self.find(source, tag)) is None:
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"timed out after {timeout:g} s")
            ready = {file for file, _ in poll.poll(1e3 * left)}
            self.collect()
            if life in ready and (source, tag) not in self._letters:
                raise RuntimeError("its process has ended")
        return letter

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self.file)


class Outbox:
    """Where letters to one other process go.

    Args:
        process, file: its `Inbox.file`.
    """

    def __init__(self, process: int, file: int) -> None:
        self._file = os.open(path(process, file), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def post(self, letter: Letter, timeout: float, meanwhile: Callable[[], None]) -> None:
        """Send a letter.

        Args:
            timeout: seconds to wait while the other inbox is full.
            meanwhile: called again and again then: whoever fills it may wait for this process to empty its own.

        Raises:
            RuntimeError: the inbox stayed full, or the other process has ended.
        """
        record = _RECORD.pack(letter.source, letter.tag, *letter.slot, letter.numel)
        until = time.monotonic() + timeout
        poll = None
        while True:
            try:
                os.write(self._file, record)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RuntimeError(f"timed out after {timeout:g} s: its inbox is full") from None
            except BrokenPipeError:
                raise RuntimeError("its process has ended") from None
            meanwhile()
            if poll is None:
                poll = select.poll()
                poll.register(self._file, select.POLLOUT)
            poll.poll(_PATIENCE)

    def close(self) -> None:
        """Close the pipe's end."""
        os.close(self._file)


@dataclass(eq=False)
class Arrival:
    """A message on its way to this process: the part of a `torch.distributed.Work` that waits need."""

    inbox: Inbox
    source: int
    tag: int
    life: int | None
    letter: Letter | None = None

    def wait(self, timeout: timedelta = _LONG, /) -> None:
        """Wait for the letter; see `Inbox.wait`."""
        if self.letter is None:
            self.letter = self.inbox.wait(self.source, self.tag, timeout.total_seconds(), self.life)

    def is_completed(self) -> bool:
        """Whether it has come, without waiting."""
        if self.letter is None:
            self.inbox.collect()
            self.letter = self.inbox.find(self.source, self.tag)
        return self.letter is not None
