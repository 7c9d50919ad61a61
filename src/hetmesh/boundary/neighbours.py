"""Neighbours: ranks on this host, to which messages go through memory that both see instead of a socket.

Through a socket the kernel copies every byte twice, and gloo wakes a thread on either side for every message. Here the
sender packs into a slot of its own (shared_memory.py), tells the receiver where (inbox.py), and the receiver puts the
message in place from where it lies.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary.inbox import Arrival, Inbox, Letter, Outbox
from hetmesh.boundary.shared_memory import Incoming, Outgoing, Slot, path

_LOOK = 1e-3  # seconds between looks at what others have yet to read, when this process closes


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others: how to reach it, and how to know that it is this rank.

    Attributes:
        boot: names the running kernel; equal on one host.
        process: its id.
        token_file, token: an open file of it and what is in there.
        inbox_file: where its letters go.
    """

    boot: str
    process: int
    token_file: int
    token: bytes
    inbox_file: int


class Neighbours:
    """The ranks that this one shares memory with.

    Args:
        rank: of this process.
        outboxes: to its neighbours, by rank.
        processes: of its neighbours, by rank.
        everyone: whether all ranks of the job are neighbours of each other; equal on all.
    """

    def __init__(
        self, rank: int, inbox: Inbox, outboxes: dict[int, Outbox], processes: dict[int, int], everyone: bool
    ) -> None:
        self.rank, self.everyone, self._inbox, self._outboxes = rank, everyone, inbox, outboxes
        self._outgoing = {peer: Outgoing() for peer in outboxes}
        self._incoming = {peer: Incoming(processes[peer]) for peer in outboxes}
        self._lives = {peer: _life(processes[peer]) for peer in outboxes}
        self._process = os.getpid()

    @staticmethod
    def connect(rank: int, size: int) -> Neighbours | None:
        """Find the neighbours. Collective over all ranks; None where there are none, or this system cannot share."""
        if size == 1:
            return None
        inbox, mine = _offer()
        offers: list[Offer | None] = [None] * size
        dist.all_gather_object(offers, mine)
        opened = {r: _outbox(mine, theirs) for r, theirs in enumerate(offers) if r != rank}
        seen = {r: outbox for r, outbox in opened.items() if outbox is not None}
        views: list[frozenset[int]] = [frozenset()] * size
        dist.all_gather_object(views, frozenset(seen))
        if mine is not None:
            os.close(mine.token_file)
        for peer in [r for r in seen if rank not in views[r]]:
            seen.pop(peer).close()
        if inbox is None or not seen:
            if inbox is not None:
                inbox.close()
            return None
        processes = {r: offer.process for r, offer in enumerate(offers) if offer is not None}
        return Neighbours(rank, inbox, seen, processes, everyone=all(len(view) == size - 1 for view in views))

    def reaches(self, peer: int) -> bool:
        """Whether messages between this rank and `peer` go this way; both say the same."""
        return peer in self._outboxes

    def take(self, peer: int, numel: int, dtype: torch.dtype) -> tuple[Slot, Tensor]:
        """Where to write a message for `peer`; `send` follows.

        Raises:
            OSError: no memory is left for it, or no file handle.
        """
        return self._outgoing[peer].take(numel, dtype)

    def send(self, peer: int, tag: int, slot: Slot, numel: int, timeout: float) -> None:
        """Tell `peer` where its message lies. Returns at once unless thousands are unread there.

        Raises:
            RuntimeError: it does not read, or its process has ended.
        """
        self._outboxes[peer].post(Letter(self.rank, tag, slot, numel), timeout, self._inbox.collect)

    def expect(self, peer: int, tag: int) -> Arrival:
        """A message from `peer` that is on its way, to be waited for."""
        return Arrival(self._inbox, peer, tag, self._lives[peer])

    def read(self, letter: Letter, dtype: torch.dtype) -> Tensor:
        """The message where it lies; `release` must follow."""
        return self._incoming[letter.source].read(letter.slot, letter.numel, dtype)

    def release(self, letter: Letter) -> None:
        """Its memory may be written to again."""
        self._incoming[letter.source].release(letter.slot)

    def close(self, patience: float) -> int:
        """Let go of everything; messages that are not read by then are lost.

        Args:
            patience: seconds to wait until what was sent has been read.

        Returns:
            Messages that nobody had read.
        """
        if self._process != os.getpid():  # a forked child, whose memory and files these are not
            return 0
        until = time.monotonic() + patience
        while (unread := self._unread()) and time.monotonic() < until:
            time.sleep(_LOOK)
        for outbox in self._outboxes.values():
            outbox.close()
        for life in self._lives.values():
            if life is not None:
                os.close(life)
        self._outboxes.clear()
        self._inbox.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        return unread

    def _unread(self) -> int:
        """Messages that their readers, if they live, have not read yet."""
        return sum(out.unread for peer, out in self._outgoing.items() if not _ended(self._lives[peer]))


def sees(mine: Offer, theirs: Offer) -> bool:
    """Whether this process can open what `theirs` points to: not in another container, nor as another user."""
    if mine.boot != theirs.boot:
        return False
    with contextlib.suppress(OSError), open(path(theirs.process, theirs.token_file), "rb") as file:
        return file.read() == theirs.token
    return False


def _outbox(mine: Offer | None, theirs: Offer | None) -> Outbox | None:
    """To a process that this one sees; None, so that both stay with sockets, where no file handle is left for it."""
    if mine is None or theirs is None or not sees(mine, theirs):
        return None
    with contextlib.suppress(OSError):
        return Outbox(theirs.process, theirs.inbox_file)
    return None


def _offer() -> tuple[Inbox, Offer] | tuple[None, None]:
    """None where this system has no memory of that kind."""
    if not hasattr(os, "memfd_create"):
        return None, None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        file = os.memfd_create("hetmesh-token", os.MFD_CLOEXEC)
        token = secrets.token_bytes(16)
        os.write(file, token)
        inbox = Inbox()
        return inbox, Offer(boot, os.getpid(), file, token, inbox.file)
    return None, None


def _life(process: int) -> int | None:
    """A file that can be read once the process has ended; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(process)
    return None


def _ended(life: int | None) -> bool:
    if life is None:
        return False
    poll = select.poll()
    poll.register(life, select.POLLIN)
    return bool(poll.poll(0))
