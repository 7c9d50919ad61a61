"""Backend: what gloo and NCCL do differently when processes talk, as one value that the World takes.

Everything else in hetmesh posts and waits through it, so that another way to move tensors (an emulated NCCL, a stub
that counts) is a subclass handed to `World` or `init`, not a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary.watchdog import Watchdog
from hetmesh.errors import BoundaryError

Message = tuple[int, Tensor]
"""The other rank and the buffer."""


class Waited(Protocol):
    """What waits need of a work in flight: of a `torch.distributed.Work`, or of what a neighbour sends."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Wait for it. Raises RuntimeError where that takes longer, or the other end is gone."""
        ...

    def is_completed(self) -> bool:
        """Whether it is over, without waiting."""
        ...


Posted = list[tuple[int | None, Waited]]
"""Works in flight with the rank that each waits for; None where one work stands for several messages."""


@dataclass(frozen=True)
class Backend:
    """Gloo's ways; subclasses say what others do otherwise.

    Attributes:
        name: as torch.distributed calls it.
        device_type: where its tensors lie.
        shares_memory: whether messages between ranks of one host go through memory that both see.
    """

    name: str = "gloo"
    device_type: str = "cpu"
    shares_memory: bool = True

    @staticmethod
    def of(name: str) -> Backend:
        """The backend that torch.distributed calls `name` (`cpu:gloo,cuda:nccl` counts as NCCL)."""
        return Nccl(name) if "nccl" in name else Backend(name)

    def connect(self, device: torch.device) -> None:
        """Make what the first message would make. Every rank calls it once, before any message."""

    def post(self, receives: Sequence[Message], sends: Iterable[Message], tag: int) -> tuple[Posted, Posted]:
        """Post receives, then sends, each of which may be packed when it is asked for: the one before is on its way.

        Args:
            tag: what messages are matched by, where the backend matches by tags.
        """
        group = _everyone()
        received: Posted = [(peer, group.recv([buffer], peer, tag)) for peer, buffer in receives]
        return received, [(peer, group.send([buffer], peer, tag)) for peer, buffer in sends]

    def wait(self, work: Waited, timeout: float, watchdog: Watchdog, what: object) -> None:
        """Wait for one work, for at most `timeout` seconds.

        Args:
            what: `str(what)` names the wait, for the watchdog.
        """
        work.wait(_seconds(timeout))

    def group_timeout(self, timeout: float) -> timedelta:
        """The timeout of a process group whose waits may take `timeout` seconds."""
        return timedelta(seconds=timeout)


@dataclass(frozen=True)
class Nccl(Backend):
    """NCCL: messages without tags, matched by their order; waits for the stream; communicators made at first use."""

    name: str = "nccl"
    device_type: str = "cuda"
    shares_memory: bool = False

    def connect(self, device: torch.device) -> None:
        # The first batch of messages on a group makes its communicator over all ranks, also those without a message:
        # they would be waited for.
        dist.all_reduce(torch.zeros(1, device=device))

    def post(self, receives: Sequence[Message], sends: Iterable[Message], tag: int) -> tuple[Posted, Posted]:
        """One coalesced batch, and its works; see `Backend.post`."""
        ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receives]
        ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in sends]
        return [(None, work) for work in (dist.batch_isend_irecv(ops) if ops else [])], []

    def wait(self, work: Waited, timeout: float, watchdog: Watchdog, what: object) -> None:
        """Let the stream wait. With a timeout the host would wait too; the watchdog looks after the work instead."""
        work.wait()
        watchdog.expect(work, str(what))  # its words alone: it may hold the buffers, and is kept until somebody looks

    def group_timeout(self, timeout: float) -> timedelta:
        """Twice: when it is over NCCL ends the process, and the watchdog must have named the boundary before."""
        return timedelta(seconds=2 * timeout)


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise BoundaryError("the World of this process is closed: nothing can be sent any more")
    return group


@lru_cache(maxsize=16)
def _seconds(timeout: float) -> timedelta:
    return timedelta(seconds=timeout)
