"""The queue of an emulated communicator: a thread that carries out batches of messages one after another, over gloo.

Of each message both sides first say what they mean, on the group's own connections, and its bytes follow where they
agree. So a batch is over when its peers have reached theirs, as large messages of NCCL are, whose sender waits too.
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh._torch_compat import default_store
from hetmesh.errors import HetmeshError

_HEADER = 1024  # bytes
_POISON = {torch.bool: True, torch.uint8: 255}  # where there is neither NaN nor a least number that nobody uses


class EmulatedError(HetmeshError, RuntimeError):
    """Something that NCCL would not do, or do wrong, or never finish. The message says which of its rules it is."""


@dataclass(eq=False)
class HalfMessage:
    """One side of a message of a batch.

    Attributes:
        buffer: what to send, or where to put what comes.
        data: what is sent, or what came: bytes of its own.
        before: the bytes of `buffer` while it is in flight.
    """

    peer: int
    buffer: Tensor
    sends: bool
    data: Tensor
    before: Tensor

    @classmethod
    def send(cls, peer: int, buffer: Tensor) -> HalfMessage:
        """Of a message to `peer`."""
        data = _bytes(buffer).clone()
        return cls(peer, buffer, True, data, data)

    @classmethod
    def receive(cls, peer: int, buffer: Tensor) -> HalfMessage:
        """Of a message from `peer`: until it is there the buffer holds nothing that anyone can use."""
        buffer.detach().fill_(_poison(buffer.dtype))
        return cls(peer, buffer, False, torch.empty_like(_bytes(buffer)), _bytes(buffer).clone())

    @property
    def size(self) -> tuple[int, str]:
        """Elements and their type, which must be equal on both sides."""
        return self.buffer.numel(), str(self.buffer.dtype)

    def deliver(self) -> bool:
        """Put what came in place. Returns whether the buffer was left alone while it was in flight."""
        alone = torch.equal(_bytes(self.buffer), self.before)
        if not self.sends:
            _bytes(self.buffer).copy_(self.data)
        return alone


@dataclass(eq=False)
class Batch:
    """What is posted in one call."""

    parts: list[HalfMessage]
    tag: int
    what: str
    posted: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)
    error: EmulatedError | None = None

    def __str__(self) -> str:
        ways = ", ".join(f"{'to' if part.sends else 'from'} rank {part.peer}" for part in self.parts)
        return f"{self.what} ({ways})"

    def deliver(self) -> None:
        """Wait until it is over, and put all in place; raises what went wrong."""
        self.done.wait()  # the queue gives up by itself
        if self.error is not None:
            raise self.error
        touched = [part for part in self.parts if not part.deliver()]
        if touched:
            raise EmulatedError(f"{self}: a buffer was written to while it was in flight, before its work's wait()")


class Queue:
    """The batches of one process on one communicator, in order.

    Args:
        number: of the backend; queues of several backends on one group do not meet.
        limit: seconds from its posting until a batch that is not over is an error.
        delay: seconds that a batch waits before it begins, at most and at random.

    Attributes:
        name: of the group; the same on all its ranks.
        connected: whether the communicator exists.
    """

    def __init__(self, group: dist.ProcessGroup, number: int, limit: float, delay: float, seed: int) -> None:
        self.name, self.connected = group.group_name, False
        self._group, self._limit, self._delay = group, limit, delay
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        self._prefix = f"hetmesh emulated NCCL {number}/{group.group_name}"
        self._random = random.Random(f"{seed} {self._rank} {group.group_name}")
        self._messages = Counter[tuple[int, int]]()  # so far, from rank to rank
        self._broken: str | None = None
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def rendezvous(self, batch: Batch) -> None:
        """Make the communicator, for which all ranks must come; the host waits. Raises EmulatedError: some do not."""
        store, key = default_store(), f"{self._prefix} rank "
        store.set(f"{key}{self._rank}", batch.what)
        if absent := missing(store, key, self._ranks, batch.posted + self._limit):
            raise EmulatedError(
                f"{batch}: rank {self._rank} posted the first batch on the communicator of ranks {self._ranks}, which "
                f"nobody connected: all of them must come to make it, and within {self._limit:g} s {absent} did not; "
                "NCCL would hang here"
            )
        self.connected = True

    def put(self, batch: Batch) -> None:
        if self._broken is not None:
            raise EmulatedError(f"{batch}: the communicator of ranks {self._ranks} is broken: {self._broken}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._prefix, daemon=True)
            self._thread.start()
        self._batches.put(batch)

    def close(self) -> None:
        """Stop the thread, once it has done what it has begun."""
        self._batches.put(None)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                if self._broken is not None:
                    raise EmulatedError(f"{batch}: after what failed: {self._broken}")
                if self._delay:
                    time.sleep(self._random.uniform(0.0, self._delay))
                self._carry_out(batch)
            except Exception as error:
                batch.error = error if isinstance(error, EmulatedError) else EmulatedError(f"{batch}: {error}")
                self._broken = self._broken or str(batch.error)
            batch.done.set()

    def _carry_out(self, batch: Batch) -> None:
        deadline = batch.posted + self._limit
        talks = [self._begin(batch, part) for part in batch.parts]
        for part, talk in zip(batch.parts, talks, strict=True):
            self._await(batch, part, talk.header, deadline)
            self._agree(batch, part, talk)
        bodies = [(part, self._move(part, talk)) for part, talk in zip(batch.parts, talks, strict=True)]
        for part, body in bodies:
            self._await(batch, part, body, deadline)
        for part, talk in zip(batch.parts, talks, strict=True):
            self._await(batch, part, talk.said, deadline)

    def _begin(self, batch: Batch, part: HalfMessage) -> _Talk:
        """Say what this rank means, and expect the same of the peer."""
        pair = (self._rank, part.peer) if part.sends else (part.peer, self._rank)
        number = self._messages[pair]
        self._messages[pair] += 1
        mine = _header({"tag": batch.tag, "what": batch.what, "size": part.size})
        theirs = torch.empty(_HEADER, dtype=torch.uint8)
        tag = 3 * number
        peer = self._ranks.index(part.peer)
        ours, other = (tag, tag + 1) if part.sends else (tag + 1, tag)
        return _Talk(
            peer, tag + 2, mine, theirs, self._group.send([mine], peer, ours), self._group.recv([theirs], peer, other)
        )

    def _agree(self, batch: Batch, part: HalfMessage, talk: _Talk) -> None:
        theirs = json.loads(bytes(talk.theirs.tolist()).rstrip())
        sender, receiver = (self._rank, part.peer) if part.sends else (part.peer, self._rank)
        pair = f"rank {sender} -> rank {receiver}"
        if (theirs["tag"], theirs["what"]) != (batch.tag, _short(batch.what)):
            raise EmulatedError(
                f"crossed order, {pair}: rank {self._rank} has come to {batch.what} and rank {part.peer} to "
                f"{theirs['what']}; NCCL has no tags, both must post in the same order"
            )
        if tuple(theirs["size"]) != part.size:
            raise EmulatedError(
                f"{batch.what}, {pair}: rank {self._rank} has {' x '.join(map(str, part.size))} and rank {part.peer} "
                f"{' x '.join(map(str, theirs['size']))}; messages must be of equal size"
            )

    def _move(self, part: HalfMessage, talk: _Talk) -> dist.Work:
        if part.sends:
            return self._group.send([part.data], talk.peer, talk.tag)
        return self._group.recv([part.data], talk.peer, talk.tag)

    def _await(self, batch: Batch, part: HalfMessage, work: dist.Work, deadline: float) -> None:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:  # too late, or the peer has given up before
            raise EmulatedError(
                f"{batch}: rank {self._rank} has waited up to the limit of {self._limit:g} s since it was posted, and "
                f"rank {part.peer} has not come to it: {self._stands(batch, part.peer)}; NCCL would hang, and then end "
                "the process"
            ) from error

    def _stands(self, batch: Batch, peer: int) -> str:
        """What a peer waits for itself, as it says when it gives up too."""
        store, key = default_store(), f"{self._prefix} gave up: rank "
        store.set(f"{key}{self._rank}", str(batch))
        if missing(store, key, [peer], time.monotonic() + 1.0):
            return "it posted nothing that it waits for"
        return f"it stands at {store.get(f'{key}{peer}').decode()}"


@dataclass(eq=False)
class _Talk:
    """What is said of one message, by both sides."""

    peer: int  # in the group
    tag: int  # of the bytes
    mine: Tensor
    theirs: Tensor
    said: dist.Work
    header: dist.Work


def missing(store: dist.Store, key: str, ranks: Iterable[int], deadline: float) -> str:
    """The ranks that have not left word under `key` and their number by `deadline`, of `time.monotonic`; or nothing."""
    absent = list(ranks)
    while absent := [rank for rank in absent if not store.check([f"{key}{rank}"])]:
        if time.monotonic() > deadline:
            return f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        time.sleep(0.001)
    return ""


def _header(value: dict[str, object]) -> Tensor:
    text = json.dumps(value | {"what": _short(str(value["what"]))}).encode()
    return torch.tensor(list(text.ljust(_HEADER)), dtype=torch.uint8)


def _short(what: str) -> str:
    return what[:100]  # of up to 6 bytes each in JSON


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype in _POISON:
        return _POISON[dtype]
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
