"""Local peers: ranks on this host, with which messages are exchanged through shared memory instead of a socket.

The sender packs into a slot of shared memory and writes where into the mailbox of the receiver, who unpacks it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import struct
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary.shared_memory import SlotReader, SlotWriter, descriptor_path
from hetmesh.boundary.watchdog import LONGEST_TIMEOUT_S

_RECORD = struct.Struct("5q")
_READ_BYTES = _RECORD.size * (2**16 // _RECORD.size)  # whole records: each is written at once, so none is cut
_FULL_POLL_MS = 20  # between looks into this process's mailbox, while that of another process is full
_MAX_POLL_MS = 2**31 - 1  # a C int
_LEFT = -1  # instead of a tag: nothing more comes from this rank
_CLOSING_POLL_S = 1e-3  # between looks at what others have yet to read, when this process closes


class MessageHeader(NamedTuple):
    """What a sender tells the receiver: its rank, the tag, file descriptor, start in the memory, number of elements."""

    source: int
    tag: int
    fd: int
    start: int
    numel: int


@dataclass(frozen=True)
class PeerHandle:
    """How other processes of a host recognise a rank, and reach it.

    Attributes:
        boot_id: of the kernel; equal on one host.
        process: its id.
        token_fd, token: descriptor of an open file, and what is in it.
        mailbox_fd: descriptor to which headers are written.
    """

    rank: int
    boot_id: str
    process: int
    token_fd: int
    token: bytes
    mailbox_fd: int


class Mailbox:
    """A pipe for headers to this process, which others open by its path. Headers are kept until they are asked for;
    those of one sender with one tag keep their order.

    A pipe wakes only the thread that waits for it. A message of gloo wakes a thread on each side besides, which costs
    several times as much as copying 24 KB. `handle` tells others how to reach the mailbox. Raises OSError: this system
    has nothing of the kind, or no file descriptor is left.
    """

    def __init__(self, rank: int) -> None:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        token_fd, token = os.memfd_create("hetmesh-token", os.MFD_CLOEXEC), secrets.token_bytes(16)
        os.write(token_fd, token)
        self.read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.handle = PeerHandle(rank, boot_id, os.getpid(), token_fd, token, write_fd)
        self._headers: dict[tuple[int, int], deque[MessageHeader]] = {}

    def sees(self, other: PeerHandle) -> bool:
        """Whether this process can open files of `other`: not on another host or in another container. Raises OSError
        where it may not, as another user."""
        path = Path(descriptor_path(other.process, other.token_fd))
        return other.boot_id == self.handle.boot_id and path.is_file() and path.read_bytes() == other.token

    def collect(self) -> None:
        """Take in what has come, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.read_fd, _READ_BYTES):
                for header in map(MessageHeader._make, _RECORD.iter_unpack(data)):
                    self._headers.setdefault((header.source, header.tag), deque()).append(header)
                if len(data) < _READ_BYTES:
                    return

    def pop(self, source: int, tag: int) -> MessageHeader | None:
        """The oldest collected header of rank `source` with `tag`, which leaves the mailbox."""
        headers = self._headers.get((source, tag))
        if headers is None:
            return None
        header = headers.popleft()
        if not headers:
            del self._headers[source, tag]
        return header

    def left(self, source: int) -> bool:
        """Whether rank `source` has said, among what was collected, that it leaves the job."""
        return (source, _LEFT) in self._headers

    def close(self) -> None:
        for fd in (self.read_fd, self.handle.mailbox_fd, self.handle.token_fd):
            os.close(fd)


class LocalPeer:
    """Another rank on this host, the one of `handle`. Raises OSError where its mailbox cannot be opened."""

    def __init__(self, mailbox: Mailbox, handle: PeerHandle) -> None:
        self.rank, self.mailbox = handle.rank, mailbox
        self.writer, self.reader = SlotWriter(), SlotReader(handle.process)
        path = descriptor_path(handle.process, handle.mailbox_fd)
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.process_fd: int | None = None  # can be read once the process has ended; not every system has it
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.process_fd = os.pidfd_open(handle.process)

    def send(self, tag: int, start: int, numel: int, timeout: float) -> None:
        """Tell it where a message lies. Returns at once unless thousands are unread there. Raises RuntimeError: its
        mailbox stayed full for `timeout` seconds, or its process has ended."""
        assert self.writer.fd is not None
        record = _RECORD.pack(self.mailbox.handle.rank, tag, self.writer.fd, start, numel)
        deadline = time.monotonic() + timeout
        while True:
            try:
                os.write(self._fd, record)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {timeout:g} s: its mailbox is full") from None
            except BrokenPipeError:
                raise RuntimeError("its process has ended") from None
            self.mailbox.collect()  # it may wait for this process to do so
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll(_FULL_POLL_MS)

    def leave(self) -> None:
        """Tell it that nothing more comes, though this process lives on."""
        with contextlib.suppress(OSError):
            os.write(self._fd, _RECORD.pack(self.mailbox.handle.rank, _LEFT, 0, 0, 0))

    @property
    def unread(self) -> int:
        """Messages that it has yet to read; none once its process has ended."""
        if self.process_fd is not None:
            poll = select.poll()
            poll.register(self.process_fd, select.POLLIN)
            if poll.poll(0):
                return 0
        return self.writer.unread

    def close(self) -> None:
        self.writer.close()
        os.close(self._fd)
        if self.process_fd is not None:
            os.close(self.process_fd)


@dataclass
class PendingReceive:
    """A message from `peer`: a `Handle`. `message` is where it lies, once it was waited for; `release` must follow."""

    peer: LocalPeer
    tag: int
    numel: int
    dtype: torch.dtype
    message: Tensor | None = None
    _header: MessageHeader | None = None

    def wait(self, timeout: timedelta = timedelta(seconds=LONGEST_TIMEOUT_S), /) -> None:
        """Wait until it has come. Raises RuntimeError: that takes longer, the other process has ended, or left the job,
        or the message has another size."""
        mailbox, process_fd, seconds = self.peer.mailbox, self.peer.process_fd, timeout.total_seconds()
        deadline = time.monotonic() + seconds
        poll = select.poll()
        for fd in (mailbox.read_fd, process_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while not self._popped():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"timed out after {seconds:g} s")
            ready = {fd for fd, _ in poll.poll(min(1e3 * left, _MAX_POLL_MS))}
            mailbox.collect()
            if process_fd in ready and not self._popped():
                raise RuntimeError("its process has ended")
            if mailbox.left(self.peer.rank) and not self._popped():
                raise RuntimeError("it has left the job")
        assert self._header is not None
        if self._header.numel != self.numel:
            raise RuntimeError(f"it sent {self._header.numel} elements for {self.numel}")
        try:
            self.message = self.peer.reader.read(self._header.fd, self._header.start, self.numel, self.dtype)
        except OSError as error:
            raise RuntimeError(f"its process ended before its message was read: {error}") from error

    def is_completed(self) -> bool:
        """Whether it has come, without waiting."""
        if self._header is None:
            self.peer.mailbox.collect()
        return self._popped()

    def _popped(self) -> bool:
        if self._header is None:
            self._header = self.peer.mailbox.pop(self.peer.rank, self.tag)
        return self._header is not None

    def release(self) -> None:
        """Its memory may be written to again."""
        assert self._header is not None
        self.peer.reader.release(self._header.start)


class LocalPeers:
    """The ranks with which this one shares memory.

    Args:
        peers: by rank.
        everyone: whether all ranks of the job share memory with each other; equal on all.
    """

    def __init__(self, mailbox: Mailbox, peers: dict[int, LocalPeer], everyone: bool) -> None:
        self.peers, self.everyone, self._mailbox = peers, everyone, mailbox
        self._process = os.getpid()

    @staticmethod
    def connect(rank: int, size: int) -> LocalPeers | None:
        """Find them. Collective over all ranks; None where there are none, or this system cannot share memory."""
        if size == 1:
            return None
        mailbox: Mailbox | None = None
        if hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):
                mailbox = Mailbox(rank)
        handles: list[PeerHandle | None] = [None] * size
        dist.all_gather_object(handles, None if mailbox is None else mailbox.handle)
        peers = {}
        for handle in handles:
            if mailbox is not None and handle is not None and handle.rank != rank:
                with contextlib.suppress(OSError):  # also where no file descriptor is left: both ranks then use gloo
                    if mailbox.sees(handle):
                        peers[handle.rank] = LocalPeer(mailbox, handle)
        reached: list[frozenset[int]] = [frozenset()] * size  # by each rank
        dist.all_gather_object(reached, frozenset(peers))
        for peer in [peer for peer in peers if rank not in reached[peer]]:
            peers.pop(peer).close()
        if mailbox is not None and peers:
            return LocalPeers(mailbox, peers, everyone=all(len(others) == size - 1 for others in reached))
        if mailbox is not None:
            mailbox.close()
        return None

    def close(self, timeout: float) -> int:
        """Release everything, at most `timeout` seconds later: others read meanwhile what was sent to them. 0: after a
        failure, of which those that wait for more are told. Returns the number of messages that nobody had read; they
        are lost."""
        if self._process != os.getpid():  # a forked child, whose memory and files these are not
            return 0
        for peer in self.peers.values() if not timeout else ():
            peer.leave()
        deadline = time.monotonic() + timeout
        while (unread := sum(peer.unread for peer in self.peers.values())) and time.monotonic() < deadline:
            time.sleep(_CLOSING_POLL_S)
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        self._mailbox.close()
        return unread
