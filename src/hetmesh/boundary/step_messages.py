"""StepMessages: one step of a plan in flight on this rank. Receives come before sends; every wait has a timeout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary.backend import Posted
from hetmesh.boundary.collective_clock import timed_collective
from hetmesh.boundary.local_peers import LocalPeer, PendingReceive
from hetmesh.boundary.log import Label
from hetmesh.boundary.rank_step import LocalPiece, RankStep, rank_step
from hetmesh.boundary.watchdog import timed_out
from hetmesh.boundary.world import World
from hetmesh.errors import BoundaryError, BoundaryTimeout
from hetmesh.layout import TransferStep

_Arrived = tuple[LocalPiece, Tensor | PendingReceive, int]
"""A message that is not received in place: its buffer and where it begins in it, or what a local peer sends."""


class StepMessages:
    """One step of a plan in flight: what this rank does in it, begun.

    Args:
        local: this rank's share of the step's source layout; None outside it.
        label, tag, group: see `Exchange`.
        collective: by one all-to-all instead of a message per peer.

    Attributes:
        buffers: which messages share that are not in place themselves; kept memory, handed back by `finish`.

    Raises:
        BoundaryError: a message or its peer is lost.
        BoundaryTimeout: a peer did not answer in time.
    """

    def __init__(
        self,
        world: World,
        step: TransferStep,
        local: Tensor | None,
        dtype: torch.dtype,
        label: Label,
        *,
        tag: int,
        group: dist.ProcessGroup | None,
        collective: bool,
    ) -> None:
        self.world, self.dtype, self.collective = world, dtype, collective
        self.label, self.group = label, group
        self.step: RankStep = rank_step(step, self.world.rank)
        self.local = None if local is None else local.contiguous()
        self.base = 0 if self.local is None else int(self.local.storage_offset())
        self.buffers: list[Tensor] = []
        self.arrived: list[_Arrived] = []
        self.receives: Posted = []
        self.sends: Posted = []
        self._done = False
        self._peer: int | None = None
        self.out: Tensor | None = None
        if self.step.result_shape is not None:
            new = torch.empty if self.step.fills else torch.zeros
            self.out = new(self.step.result_shape, dtype=dtype, device=world.device)
        if collective:
            self._post_all_to_all(step, tag)
        elif self.step.messages:
            if world.local_peers is None or not world.local_peers.everyone:
                self._post(tag)
            if world.local_peers is not None:
                self._exchange_locally(world.local_peers.peers, tag)
            self.world.log.add_messages(self.label, self.step.messages, self.dtype.itemsize, "p2p")
        if not self.step.order:  # summands wait, so that sums do not depend on arrival
            self._put_own()

    def _post(self, tag: int) -> None:
        backend, watchdog = self.world.backend, self.world.watchdog
        try:
            with watchdog.watching(self):  # making a communicator would block
                self.receives, self.sends = backend.post(self._places(), self._messages(), tag, self.group, self.label)
        except RuntimeError as error:
            raise self._lost(error) from error
        backend.posted([*self.receives, *self.sends], watchdog, self)

    def _buffer(self, numel: int) -> Tensor:
        buffer = self.world.buffers.take(numel, self.dtype)
        self.buffers.append(buffer)
        return buffer

    def _places(self) -> list[tuple[int, Tensor]]:
        """Where messages arrive: in the result where their place is one run of it, else in a buffer."""
        places = []
        buffer = self._buffer(self.step.received_packed) if self.step.received_packed else None
        for part in self._not_local(self.step.receives):
            if part.flat:
                assert self.out is not None
                place = part.blocks[0].of(self.out)
            else:
                assert buffer is not None
                place = buffer[part.start : part.start + part.numel]
                self.arrived.append((part, buffer, part.start))
            places.append((part.peer, self._counted(place, part)))
        return places

    def _messages(self) -> Iterator[tuple[int, Tensor]]:
        """What to send: the place in the source where that is one run of it, else packed when it is asked for."""
        buffer = self._buffer(self.step.sent_packed) if self.step.sent_packed else None
        for part in self._not_local(self.step.sends):
            assert self.local is not None
            if part.flat:
                message = part.blocks[0].of(self.local, self.base)
            else:
                assert buffer is not None
                message = buffer[part.start : part.start + part.numel]
                self._pack(part, buffer, part.start)
            yield part.peer, self._counted(message, part)

    def _not_local(self, parts: Iterable[LocalPiece]) -> Iterator[LocalPiece]:
        """Those whose messages the backend carries, and not shared memory."""
        local_peers = self.world.local_peers
        return (part for part in parts if local_peers is None or part.peer not in local_peers.peers)

    def _exchange_locally(self, peers: Mapping[int, LocalPeer], tag: int) -> None:
        """Expect the messages of ranks on this host, and pack those for them in shared memory."""
        for part in self.step.receives:
            if part.peer in peers:
                receive = PendingReceive(peers[part.peer], tag, part.numel, self.dtype)
                self.arrived.append((part, receive, 0))
                self.receives.append((part.peer, receive))
        for part in self.step.sends:
            if part.peer in peers:
                peer, self._peer = peers[part.peer], part.peer
                try:
                    start, message = peer.writer.take(part.numel, self.dtype)
                except OSError as error:
                    lack = f"no memory to share with rank {part.peer} for {part.numel} elements"
                    raise BoundaryError(f"{self.label}: {lack}: {error}") from error
                self._pack(part, message, int(message.storage_offset()))
                try:
                    peer.send(tag, start, part.numel, self.world.timeout)
                except RuntimeError as error:
                    raise self._lost(error) from error

    def _post_all_to_all(self, step: TransferStep, tag: int) -> None:
        ranks = sorted({*step.src.mesh.ranks, *step.dst.mesh.ranks})
        channel = self.group
        fits = channel is not None and dist.get_process_group_ranks(channel) == ranks
        group = channel if fits else self.world.group(ranks)
        if group is None:
            return
        sent = {part.peer: part for part in self.step.sends}
        expected = {part.peer: part for part in self.step.receives}
        sizes_in = [sent[r].numel if r in sent else 0 for r in ranks]
        sizes_out = [expected[r].numel if r in expected else 0 for r in ranks]
        all_in, all_out = sum(sizes_in), sum(sizes_out)
        buffer_in, buffer_out = self._buffer(all_in), self._buffer(all_out)
        for rank, start in zip(ranks, itertools.accumulate(sizes_in, initial=0), strict=False):
            if rank in sent:
                self._pack(sent[rank], buffer_in, start)
        flat_in, flat_out = buffer_in[:all_in], buffer_out[:all_out]
        work = self.world.backend.all_to_all(flat_out, flat_in, (sizes_out, sizes_in), tag, group, self.label)
        self.world.log.add(self.label, "received", None, flat_out.nbytes, "all_to_all")
        for rank, start in zip(ranks, itertools.accumulate(sizes_out, initial=0), strict=False):
            if rank in expected:
                self.arrived.append((expected[rank], buffer_out, start))
        self.receives.append((None, work))
        self.world.backend.posted(self.receives, self.world.watchdog, self)

    def _counted(self, message: Tensor, part: LocalPiece) -> Tensor:
        # A shorter message lands silently in a longer buffer and a longer one ends the process: count before posting.
        if message.numel() != part.numel:
            raise BoundaryError(f"{self.label}: buffer of {message.numel()} elements for a piece of {part.numel}")
        return message

    def _pack(self, part: LocalPiece, buffer: Tensor, start: int) -> None:
        assert self.local is not None
        for block, at in zip(part.blocks, part.packed, strict=True):
            at.of(buffer, start).copy_(block.of(self.local, self.base))

    def _put(self, part: LocalPiece, source: Tensor | PendingReceive, start: int, *, add: bool = False) -> None:
        if isinstance(source, PendingReceive):
            assert source.message is not None
            self._put(part, source.message, int(source.message.storage_offset()), add=add)
            source.release()
            return
        assert self.out is not None
        for block, at in zip(part.blocks, part.packed, strict=True):
            _move(at.of(source, start), block.of(self.out), add)

    def _put_own(self, *, add: bool = False) -> None:
        for source, result in self.step.own:
            assert self.local is not None
            assert self.out is not None
            _move(source.of(self.local, self.base), result.of(self.out), add)

    def receive(self) -> Tensor | None:
        """Wait for what this rank receives and put it in place."""
        if not self._done:
            self._arrive(self.receives)
        return self.out

    def _arrive(self, works: Posted) -> None:
        """Wait for works, all receives among them, and complete the result."""
        # Put in place one by one, while the others are on their way; sums in the plan's order, when all are there.
        by_peer = {arrived[0].peer: arrived for arrived in self.arrived}
        self._wait(works, {} if self.step.order else by_peer)
        add = not self.step.fills
        for rank in self.step.order:
            if rank == self.world.rank:
                self._put_own(add=add)
            else:
                self._put(*by_peer[rank], add=add)
            add = True
        self._keep()
        self._done = True

    def _keep(self) -> None:
        """What was read here, maybe on another stream than that on which it was made, keeps its memory until then: this
        may be dropped when its messages are over, before the device has put them in place."""
        accelerator = self.world.accelerator
        if accelerator.asynchronous:
            current = accelerator.current_stream()
            for tensor in (*self.buffers, *(() if self.local is None else (self.local,))):
                accelerator.used_by(tensor, current)

    def finish(self) -> Tensor | None:
        """Wait for everything."""
        if self._done:
            self._wait(self.sends, {})
        else:
            self._arrive([*self.receives, *self.sends])
        for buffer in self.buffers:
            self.world.buffers.give(buffer)
        self.buffers.clear()
        self.local = None
        return self.out

    def completed(self) -> bool:
        """Whether all messages have gone through."""
        return all(work.is_completed() for _, work in [*self.receives, *self.sends])

    def _wait(self, works: Posted, places: dict[int, _Arrived]) -> None:
        """Wait for works, and put in place what each of them brought: by its peer, or all that one work brought."""
        if not works:
            return
        world, wait = self.world, self.world.backend.wait
        waited = 0.0
        try:
            with timed_collective(), world.watchdog.watching(self):
                for peer, work in works:
                    self._peer, started = peer, time.perf_counter()
                    wait(work, world.timeout)
                    waited += time.perf_counter() - started
                    world.watchdog.progress()
                    if peer is not None and peer in places:
                        self._put(*places.pop(peer))
        except RuntimeError as error:
            raise self._lost(error) from error
        world.log.add_wait(self.label, waited)
        for place in places.values():
            self._put(*place)

    def _lost(self, error: RuntimeError) -> BoundaryError | BoundaryTimeout:
        """What to raise for an error of a wait."""
        if timed_out(error):
            return BoundaryTimeout(f"{self.label}: {self.world.waited(self._peers)}")
        return BoundaryError(f"{self.label}: rank {self.world.rank} lost {self._peers}: {error}")

    @property
    def _peers(self) -> str:
        """Whom this waits for: now, or before any wait, in all its messages."""
        if self.collective:
            return "a collective"
        parts = (*self.step.receives, *self.step.sends)
        peers = sorted({part.peer for part in parts}) if self._peer is None else [self._peer]
        return f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"

    def __str__(self) -> str:
        """How the watchdog names this wait."""
        return f"{self.label}: rank {self.world.rank}, waiting for {self._peers}"


def _move(source: Tensor, target: Tensor, add: bool) -> None:
    if add:
        target.add_(source)
    else:
        target.copy_(source)
