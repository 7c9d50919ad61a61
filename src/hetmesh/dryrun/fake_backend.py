"""The backend of a dry run: messages as NCCL would carry them, to ranks that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hetmesh.boundary.backend import Message, Nccl, Posted
from hetmesh.dryrun.fake_autocast import NAME


@dataclass
class TimedWaits:
    """How often the host waited with a timeout, which on NCCL blocks it until the message is there."""

    count: int = 0


class _Done:
    """A message that has arrived."""

    def __init__(self, timed: TimedWaits) -> None:
        self.timed = timed

    def wait(self, timeout: timedelta | None = None, /) -> object:
        """Nothing to wait for; with a timeout it is counted."""
        self.timed.count += timeout is not None
        return True

    def is_completed(self) -> bool:
        """It is over."""
        return True


@dataclass(frozen=True)
class FakeBackend(Nccl):
    """NCCL's ways; nothing is sent, and what is received has the planned shape.

    Attributes:
        timed: waits with a timeout.
    """

    device_type: str = NAME
    timed: TimedWaits = field(default_factory=TimedWaits)

    def connect(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """There is nobody to connect to."""

    def post(
        self,
        receives: Sequence[Message],
        sends: Iterable[Message],
        tag: int,
        group: dist.ProcessGroup | None,
        what: object,
    ) -> tuple[Posted, Posted]:
        """Packs what is sent; see `Backend.post`."""
        count = len(receives) + sum(1 for _ in sends)
        return ([(None, _Done(self.timed))] if count else []), []
