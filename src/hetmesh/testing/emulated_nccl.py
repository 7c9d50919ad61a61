"""EmulatedNccl: a backend with NCCL's rules on CPU processes, so that what would hang or be wrong on GPUs fails here.

Messages go through gloo and collectives too; order, communicators, and what is there when, are NCCL's: README.md lists
the rules, and how a breach of each shows.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh._torch_compat import default_store
from hetmesh.boundary import Nccl, World, init
from hetmesh.boundary.backend import Group, PeerBuffer, Posted
from hetmesh.boundary.watchdog import WATCHDOG, Watchdog
from hetmesh.testing.emulated_queue import Batch, EmulatedError, HalfMessage, Queue, missing
from hetmesh.testing.in_flight import InFlight, Launch, compare_collectives, stuck

_numbers = itertools.count()  # of backends in this process; equal on all ranks, which make them alike


@dataclass
class Counts:
    """What happened since the backend was made.

    Attributes:
        batches, messages: posted by this rank.
        timed_waits: waits that blocked the host, for they had a timeout.
        communicators: made by `connect` or by a first batch.
        collectives: watched in steps.
    """

    batches: int = 0
    messages: int = 0
    timed_waits: int = 0
    communicators: int = 0
    collectives: int = 0


@dataclass(frozen=True, eq=False)
class EmulatedNccl(Nccl):
    """NCCL's rules over a gloo process group. Pass it to `World` or `init` on every rank, and close it at the end.

    Args:
        patience: seconds until a rendezvous or a work is an error, counted from posting; None: the timeout of process
            groups, when NCCL would end the process.
        delay: each batch waits up to this many seconds before it begins, at random.
        seed: of the delays.
        chooses_as: the backend whose costs and abilities count where transports are chosen: with "gloo" nearly all
            goes by messages.
    """

    name: str = "gloo"
    device_type: str = "cpu"
    patience: float | None = None
    delay: float = 0.0
    seed: int = 0
    chooses_as: str = "nccl"
    counts: Counts = field(default_factory=Counts)
    _state: _State = field(default_factory=lambda: _State(next(_numbers)))

    @property
    def link(self) -> str:
        return self.chooses_as

    def connect(self, device: torch.device, group: Group = None) -> None:
        super().connect(device, group)
        self._queue(group).connected = True
        self.counts.communicators += 1

    def post(
        self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int, group: Group, what: object
    ) -> tuple[Posted, Posted]:
        """One batch at the end of the communicator's queue; see `Backend.post`. Raises EmulatedError: ranks do not come
        to the rendezvous of a communicator that does not exist yet, or something posted on it before has failed."""
        parts = [HalfMessage.receive(peer, buffer) for peer, buffer in receives]
        parts += [HalfMessage.send(peer, buffer) for peer, buffer in sends]
        return ([(None, self._put(Batch(parts, tag, str(what)), group))] if parts else []), []

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        sizes: tuple[Sequence[int], Sequence[int]],
        tag: int,
        group: dist.ProcessGroup,
        what: object,
    ) -> EmulatedWork:
        """A batch of messages between all ranks of the group, as it is on NCCL; see `Backend.all_to_all`."""
        peers = dist.get_process_group_ranks(group)
        to_receive, to_send = (whole.split(list(parts)) for whole, parts in zip((received, sent), sizes, strict=True))
        parts = [HalfMessage.receive(peer, buffer) for peer, buffer in zip(peers, to_receive, strict=True)]
        parts += [HalfMessage.send(peer, buffer) for peer, buffer in zip(peers, to_send, strict=True)]
        here = dist.get_rank()
        own = [part.buffer for part in parts if part.peer == here]
        own[0].copy_(own[1])
        return self._put(Batch([p for p in parts if p.buffer.numel() and p.peer != here], tag, str(what)), group)

    def _put(self, batch: Batch, group: dist.ProcessGroup | None) -> EmulatedWork:
        queue = self._queue(group)
        work = EmulatedWork(batch, self)
        if not queue.connected:
            queue.rendezvous(batch)
            self.counts.communicators += 1
        self._state.posted.append(work)
        parts = [(part.peer, int(part.sends)) for part in batch.parts]
        self._state.launched.append((batch.what, queue.name, parts))
        self._state.in_flight.add(work)
        queue.put(batch)
        self.counts.batches += 1
        self.counts.messages += len(batch.parts)
        return work

    def posted(self, works: Posted, watchdog: Watchdog, what: object) -> None:
        """See `Backend.posted`. Collectives are gloo's own: it gives up by itself, and some never count as over."""
        super().posted([work for work in works if isinstance(work[1], EmulatedWork)], watchdog, what)

    def group_timeout(self, timeout: float) -> timedelta:
        limit = super().group_timeout(timeout)
        self._state.limit = limit.total_seconds()
        return limit

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch every operation of the body; at its end every work must have been waited for, on every rank.

        Raises:
            EmulatedError: it was not, another rank failed, or ranks had their collectives, or messages of several
                communicators, in different orders.
        """
        state, store, rank = self._state, default_store(), dist.get_rank()
        state.steps += 1
        state.launched.clear()
        key = f"hetmesh emulated NCCL {state.number} step {state.steps} rank "
        try:
            with state.in_flight:
                yield
            self.check()
        except BaseException as error:
            store.set(f"{key}{rank}", json.dumps({"failed": str(error)}))
            raise
        mine = state.in_flight.take_collectives()
        store.set(f"{key}{rank}", json.dumps({"collectives": mine, "launched": state.launched}))
        absent = missing(store, key, range(dist.get_world_size()), time.monotonic() + self._limit)
        if absent:
            raise EmulatedError(f"rank {rank} is done with its step; within {self._limit:g} s {absent} were not")
        seen = {other: json.loads(store.get(f"{key}{other}")) for other in range(dist.get_world_size())}
        for other, report in seen.items():
            if isinstance(report.get("failed"), str):
                raise EmulatedError(f"rank {other} failed in this step: {report['failed']}")
        compare_collectives(rank, {other: report["collectives"] for other, report in seen.items()})
        if circle := stuck({other: report["launched"] for other, report in seen.items()}):
            raise EmulatedError(
                f"crossed order between communicators: {circle}; NCCL may hang where ranks launch work of several "
                "communicators in different orders"
            )
        self.counts.collectives += sum(map(len, mine.values()))

    def check(self) -> None:
        """Raise EmulatedError for works that were posted and that nobody has waited for."""
        forgotten = [work for work in self._state.posted if not work.waited]
        for work in self._state.posted:
            if work.waited:
                work.deliver()
        self._state.posted.clear()
        if forgotten:
            names = "; ".join(str(work.batch) for work in forgotten)
            raise EmulatedError(f"rank {dist.get_rank()} never waited for what it posted: {names}")

    def close(self) -> None:
        """Stop the queues. Communicators are gone then."""
        for queue in self._state.queues.values():
            queue.close()
        self._state.queues.clear()
        self._state.posted.clear()

    def _queue(self, group: dist.ProcessGroup | None) -> Queue:
        group = dist.group.WORLD if group is None else group
        assert group is not None
        queues = self._state.queues
        if group.group_name not in queues:
            queues[group.group_name] = Queue(group, self._state.number, self._limit, self.delay, self.seed)
        return queues[group.group_name]

    @property
    def _limit(self) -> float:
        return self._state.limit if self.patience is None else self.patience


@contextmanager
def emulated_world(backend: EmulatedNccl | None = None, *, timeout: float = 60.0) -> Iterator[World]:
    """A World of emulated NCCL over the gloo processes there are, connected, and the current one in the body. Every
    rank enters it. What `backend` counted can be read afterwards."""
    backend = EmulatedNccl() if backend is None else backend
    world = World(timeout=timeout, backend=backend)
    backend.group_timeout(timeout)
    try:
        with world.as_current():
            world.connect()
            yield world
    finally:
        backend.close()
        world.watchdog.close()


def emulate() -> None:
    """From here on the World of this process is over emulated NCCL: `WorkerPool(4, begin=emulate)` does all over it."""
    init(backend=EmulatedNccl(), timeout=60.0)


class _State:
    """What changes while an `EmulatedNccl` is used."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.limit = 300.0
        self.steps = 0
        self.queues: dict[str, Queue] = {}
        self.posted: list[EmulatedWork] = []  # since the last step ended
        self.launched: list[Launch] = []  # since the last step began
        self.in_flight = InFlight()


class EmulatedWork:
    """A batch in flight, as `torch.distributed.Work` is one.

    Attributes:
        waited: whether somebody has waited for it, or knows it to be over.
    """

    def __init__(self, batch: Batch, backend: EmulatedNccl) -> None:
        self.batch, self.waited = batch, False
        self._backend = backend
        self._delivered = False

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """What follows sees what came; the host goes on, unless there is a timeout."""
        self.waited = True
        if timeout is not None:
            self._backend.counts.timed_waits += 1
        if timeout is not None or not self._backend._state.in_flight.watching:
            self.deliver()
        return True

    def is_completed(self) -> bool:
        """Whether it is over, without waiting."""
        over = self.batch.done.is_set()
        # The watchdog asks too, in its own thread, and that is no wait.
        if over and threading.current_thread().name != WATCHDOG:
            self.waited = True
        return over

    def deliver(self) -> None:
        """Block until it is over and put what came into its buffers. Raises EmulatedError: it failed, or somebody wrote
        to its buffers while it was in flight."""
        if not self._delivered:
            self._delivered = True
            self._backend._state.in_flight.remove(self)
            self.batch.deliver()
