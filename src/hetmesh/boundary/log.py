"""The communication log: every message of every boundary, and collectives inside modules whose bytes follow from what
is done with tokens and parameters, counted at the buffers that carry them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Label:
    """Names one transfer in logs and errors.

    Attributes:
        microbatch: of the boundary's source, also where gradients come back to it.
        to: of its destination, where that is another number.
    """

    boundary: str
    microbatch: int = 0
    direction: Literal["forward", "backward"] = "forward"
    to: int | None = None

    def __str__(self) -> str:
        to = "" if self.to is None else f" to {self.to}"
        return f"boundary {self.boundary!r}, microbatch {self.microbatch}{to}, {self.direction}"


@dataclass(frozen=True, slots=True)
class Message:
    """One log entry of this rank.

    Attributes:
        op: `sent` or `received`; collectives are logged once, as received.
        peer: the other rank; None for a collective.
        bytes: size of the buffer that carries it.
        transport: `p2p`, `all_to_all` or `dtensor`; `all_gather`, `reduce_scatter` or `all_reduce` for a collective of
            expert or fully sharded data parallelism.
    """

    label: Label
    op: Literal["sent", "received"]
    peer: int | None
    bytes: int
    transport: str


Counted = tuple[Literal["sent", "received"], int | None, int]
"""A message before it has a label: op, peer (None for a collective) and elements."""


class CommunicationLog:
    """The newest messages of this rank and running totals. Cheap enough to be always on. `agreeing_s`: seconds since
    the last `clear` in which this rank waited until scalars were summed over all ranks."""

    def __init__(self, keep: int = 65536) -> None:
        self.agreeing_s = 0.0
        # By transfer, as `add_messages` got them: making a Message of each costs as much as posting it.
        self._transfers: deque[tuple[Label, tuple[Counted, ...], int, str]] = deque(maxlen=keep)
        self._received: dict[tuple[str, str], int] = {}
        self._waited: dict[str, float] = {}

    def add(self, label: Label, op: Literal["sent", "received"], peer: int | None, size: int, transport: str) -> None:
        """Record one message of `size` bytes."""
        self.add_messages(label, ((op, peer, size),), 1, transport)

    def add_messages(self, label: Label, messages: tuple[Counted, ...], itemsize: int, transport: str) -> None:
        """Record messages of elements of `itemsize` bytes."""
        self._transfers.append((label, messages, itemsize, transport))
        received = sum(numel for op, _, numel in messages if op == "received")
        if received:
            key = (label.boundary, label.direction)
            self._received[key] = self._received.get(key, 0) + received * itemsize

    def add_wait(self, label: Label, seconds: float) -> None:
        """Record that this rank waited for messages of a boundary."""
        self._waited[label.boundary] = self._waited.get(label.boundary, 0.0) + seconds

    @property
    def messages(self) -> tuple[Message, ...]:
        """The newest messages, oldest first."""
        return tuple(
            Message(label, op, peer, numel * itemsize, transport)
            for label, messages, itemsize, transport in self._transfers
            for op, peer, numel in messages
        )

    def bytes_received(self, boundary: str | None = None, direction: str | None = None) -> int:
        """Bytes received since the last `clear`, over all boundaries and directions or the named ones."""
        return sum(
            size
            for (name, way), size in self._received.items()
            if boundary in (None, name) and direction in (None, way)
        )

    def seconds_waited(self, boundary: str) -> float:
        """Seconds since the last `clear` in which this rank did nothing but wait for messages of a boundary, both
        directions. On CUDA only what the host waits."""
        return self._waited.get(boundary, 0.0)

    def clear(self) -> None:
        self._transfers.clear()
        self._received.clear()
        self._waited.clear()
        self.agreeing_s = 0.0
