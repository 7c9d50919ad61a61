"""Backend: what gloo and NCCL do differently when processes talk, as one value that the World takes.

Everything else in hetmesh posts and waits through it, so that another way to move tensors (an emulated NCCL, a stub
that counts) is a subclass handed to `World` or `init`, not a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary.watchdog import GRACE, Handle, Watchdog
from hetmesh.errors import BoundaryError

PeerBuffer = tuple[int, Tensor]
"""The other rank of a message, and its buffer."""

Group = dist.ProcessGroup | None
"""A communicator; None: that of all ranks."""

Posted = list[tuple[int | None, Handle]]
"""Works in flight with the rank that each waits for; None where one work stands for several messages."""


@dataclass(frozen=True)
class Backend:
    """How gloo does it; subclasses override what other backends do differently.

    Attributes:
        name: as torch.distributed calls it.
        device_type: where its tensors lie.
        shares_memory: whether ranks of one host exchange messages through memory that both see, and not by `post`.
        by_order: whether messages are matched by their order on a communicator, and not by tags: then each purpose has
            a separate communicator (`process_groups.Channel`).
    """

    name: str = "gloo"
    device_type: str = "cpu"
    shares_memory: bool = True
    by_order: bool = False

    @property
    def link(self) -> str:
        """Whose costs and abilities count where a transport is chosen; see `transport.choose`."""
        return self.name

    @staticmethod
    def of(name: str) -> Backend:
        """The backend that torch.distributed calls `name` (`cpu:gloo,cuda:nccl` counts as NCCL)."""
        return Nccl(name) if "nccl" in name else Backend(name)

    def connect(self, device: torch.device, group: Group = None) -> None:
        """Make what the first message on a group would make. All its ranks call it once, before any message."""

    def post(
        self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int, group: Group, what: object
    ) -> tuple[Posted, Posted]:
        """Post receives, then sends, each of which may be packed when it is asked for: the one before is on its way.

        Args:
            receives, sends: buffers, with ranks of the job.
            tag: what messages are matched by, where the backend matches by tags; then all go through one group.
            group: the communicator, where it matches by order.
            what: `str(what)` names the transfer.
        """
        everyone = _everyone()
        received: Posted = [(peer, everyone.recv([buffer], peer, tag)) for peer, buffer in receives]
        return received, [(peer, everyone.send([buffer], peer, tag)) for peer, buffer in sends]

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        sizes: tuple[Sequence[int], Sequence[int]],
        tag: int,
        group: dist.ProcessGroup,
        what: object,
    ) -> Handle:
        """Begin an all-to-all of flat buffers in which the ranks of `group` follow each other.

        Args:
            sizes: elements per rank, received and sent.
            tag, what: as in `post`.
        """
        work = dist.all_to_all_single(received, sent, list(sizes[0]), list(sizes[1]), group=group, async_op=True)
        assert work is not None
        return work

    def posted(self, works: Posted, watchdog: Watchdog, what: object) -> None:
        """Called once after something was posted: messages and collectives that nobody waits for on the spot. `what`:
        `str(what)` names them, for the watchdog."""

    def wait(self, work: Handle, timeout: float) -> None:
        """Wait for one work, for at most `timeout` seconds."""
        work.wait(timedelta(seconds=timeout))

    def step(self) -> AbstractContextManager[object]:
        """Surrounds what a rank does in one step: after it nothing is in flight, and everything was waited for."""
        return nullcontext()

    def group_timeout(self, timeout: float) -> timedelta:
        """The timeout of a process group whose waits may take `timeout` seconds."""
        return timedelta(seconds=timeout)


@dataclass(frozen=True)
class Nccl(Backend):
    """NCCL: messages without tags, matched by their order; waits for the stream; communicators made at first use."""

    name: str = "nccl"
    device_type: str = "cuda"
    shares_memory: bool = False
    by_order: bool = True

    def connect(self, device: torch.device, group: Group = None) -> None:
        # The first batch of messages on a group makes its communicator over all its ranks, also those without a
        # message: they would be waited for.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(
        self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int, group: Group, what: object
    ) -> tuple[Posted, Posted]:
        """One coalesced batch, and its works; see `Backend.post`."""
        ops = [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in receives]
        ops += [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sends]
        return [(None, work) for work in (dist.batch_isend_irecv(ops) if ops else [])], []

    def posted(self, works: Posted, watchdog: Watchdog, what: object) -> None:
        """The watchdog looks after them from here on, since NCCL counts from here too."""
        name = str(what)  # only the text is kept: the object may hold buffers
        for _, work in works:
            watchdog.expect(work, name)

    def wait(self, work: Handle, timeout: float) -> None:
        """Let the stream wait. With a timeout the host would wait too."""
        work.wait()

    def group_timeout(self, timeout: float) -> timedelta:
        """Twice, and a grace: then NCCL ends the process, and the watchdog must have named the boundary before."""
        return timedelta(seconds=2 * timeout + GRACE)


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise BoundaryError("the World of this process is closed: nothing can be sent any more")
    return group
