"""Exchange: one TransferPlan in flight on this rank. Receives are posted before sends; every wait has a timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hetmesh.boundary import pack
from hetmesh.boundary.log import Label
from hetmesh.boundary.transport import choose
from hetmesh.boundary.world import World
from hetmesh.errors import BoundaryError
from hetmesh.layout import Piece, Step, TransferPlan
from hetmesh.layout.intervals import Intervals, extent


class Exchange:
    """Carries out one plan on this rank: `start` posts every message, `finish` waits and returns the result.

    Args:
        plan: the same on every rank that takes part.
        local: this rank's share of the source layout; None on ranks outside it.
        dtype: of the elements, equal on all ranks.
        label: names the transfer in logs and errors.
        transport: `auto`, `p2p`, `all_to_all` or `dtensor`.
        tag: equal on all ranks for this transfer and different from others in flight (gloo matches by it; NCCL
            matches by order, so exchanges between a pair of ranks must start in the same order on both).

    Raises:
        BoundaryError: the local tensor is not what the source layout promises.
        BoundaryTimeout: a peer did not answer in time; names boundary, microbatch, direction, rank and peer.
    """

    def __init__(
        self,
        world: World,
        plan: TransferPlan,
        local: Tensor | None,
        dtype: torch.dtype,
        label: Label,
        *,
        transport: str = "auto",
        tag: int = 0,
    ) -> None:
        self.world, self.plan, self.label, self.dtype, self.tag = world, plan, label, dtype, tag
        self.transport = choose(plan, world.backend, transport)
        self._check_local(local)
        self._local = local
        self._result: Tensor | None = None
        self._pending: _PendingStep | None = None

    def _check_local(self, local: Tensor | None) -> None:
        member = self.world.rank in self.plan.src.mesh
        if (local is not None) != member:
            need = "must pass its share" if member else "is not in the source mesh and must pass None"
            raise BoundaryError(f"{self.label}: rank {self.world.rank} {need} of {self.plan.src}")
        if local is None:
            return
        want = self.plan.src.local_shape(self.plan.shape, self.world.rank)
        if tuple(local.shape) != want or local.dtype != self.dtype or local.device.type != self.world.device.type:
            raise BoundaryError(
                f"{self.label}: on rank {self.world.rank} the layout {self.plan.src} of shape {self.plan.shape} "
                f"promises a local {want} {self.dtype} tensor on {self.world.device.type}, got {tuple(local.shape)} "
                f"{local.dtype} on {local.device.type}"
            )

    def start(self) -> Exchange:
        """Post all messages of the last step (earlier steps, the reduction of a Partial source, are carried out)."""
        if self.plan.is_identity:  # nothing to do: the same memory on both sides
            self._result, self._local = self._local, None
            return self
        if self.transport == "dtensor":
            self._result = self._redistribute()
            return self
        local = self._local
        for step in self.plan.steps[:-1]:
            local = self._post(step, local).finish()
        self._pending = self._post(self.plan.steps[-1], local)
        self._local = None
        return self

    def finish(self) -> Tensor | None:
        """Wait for every message. Returns this rank's share of the destination layout, or None outside it."""
        if self._pending is not None:
            self._result = self._pending.finish()
            self._pending = None
        return self._result

    def finish_receiving(self) -> Tensor | None:
        """Like `finish`, but leaves sends in flight; `finish` must follow before the step ends."""
        if self._pending is not None:
            self._result = self._pending.receive()
        return self._result

    def completed(self) -> bool:
        """Whether nothing is in flight any more, without waiting."""
        return self._pending is None or self._pending.completed()

    def _post(self, step: Step, local: Tensor | None) -> _PendingStep:
        pending = _PendingStep(self, step, local)
        pending.post(self.transport)
        return pending

    def _redistribute(self) -> Tensor | None:
        if self._local is None:
            return None
        mesh = self.world.device_mesh(self.plan.src.mesh)
        assert mesh is not None
        source = DTensor.from_local(
            self._local,
            mesh,
            self.plan.src.torch_placements,
            run_check=False,
            shape=torch.Size(self.plan.shape),
            stride=contiguous_stride(self.plan.shape),
        )
        started = time.perf_counter()
        with self.world.watchdog.watching(self.label):
            result = source.redistribute(mesh, self.plan.dst.torch_placements).to_local()
        self.world.log.add_wait(self.label, time.perf_counter() - started)
        size = self.plan.bytes_received(self.world.rank, self.dtype.itemsize)
        self.world.log.add(self.label, "received", None, size, "dtensor")
        return result


class _PendingStep:
    """One step in flight."""

    def __init__(self, exchange: Exchange, step: Step, local: Tensor | None) -> None:
        self.world, self.label, self.tag, self.dtype = exchange.world, exchange.label, exchange.tag, exchange.dtype
        self.step, self.local = step, local
        rank = self.world.rank
        self.held: tuple[Intervals, ...] = ()
        if local is not None:
            self.held = step.src.intervals(step.shape, rank)
        self.sent = step.sent(rank)
        self.received = step.received(rank)
        self.out: Tensor | None = None
        self.kept: tuple[Intervals, ...] = ()
        if rank in step.dst.mesh:
            self.kept = step.dst.intervals(step.shape, rank)
            shape = tuple(extent(rows) for rows in self.kept)
            whole = not step.summed and sum(piece.numel for piece in self.received) == math.prod(shape)
            new = torch.empty if whole else torch.zeros
            self.out = new(shape, dtype=exchange.dtype, device=self.world.device)
        self.own = [piece for piece in self.received if piece.src == rank]
        self.remote = [piece for piece in self.received if piece.src != rank]
        self.buffers: dict[int, Tensor] = {}  # by source rank
        self.in_place: set[int] = set()  # source ranks whose buffer is the place itself
        self.receives: list[tuple[int | None, dist.Work]] = []
        self.sends: list[tuple[int | None, dist.Work]] = []
        self._keep: list[Tensor] = []
        self._done = False

    def post(self, transport: str) -> None:
        if transport == "all_to_all":
            self._post_all_to_all()
        else:
            self._post_p2p()
        if not self.step.summed:  # summands wait, so that sums do not depend on arrival
            for piece in self.own:
                self._put_own(piece)

    def _post_p2p(self) -> None:
        messages = self._messages()
        if "nccl" in self.world.backend:  # one coalesced batch, and one work
            ops = [dist.P2POp(post, tensor, peer, tag=self.tag) for post, tensor, peer in messages]
            self.receives += [(None, work) for work in (dist.batch_isend_irecv(ops) if ops else [])]
            return
        for post, tensor, peer in messages:
            work = post(tensor, peer, tag=self.tag)
            assert work is not None
            (self.receives if post is dist.irecv else self.sends).append((peer, work))

    def _messages(self) -> Iterator[tuple[Callable[..., dist.Work | None], Tensor, int]]:
        """What to post, receives first. A piece is packed when it is asked for: the one before is then on its way."""
        for piece in sorted(self.remote, key=lambda piece: piece.src):
            buffer = self._receive_buffer(piece)
            self.world.log.add(self.label, "received", piece.src, buffer.nbytes, "p2p")
            yield dist.irecv, buffer, piece.src
        # Peers in rotated order, so that the ranks do not all send to the same one first.
        rank, size = self.world.rank, self.world.size
        for piece in sorted(self.sent, key=lambda piece: (piece.dst - rank) % size):
            buffer = self._packed(piece)
            self._keep.append(buffer)
            self.world.log.add(self.label, "sent", piece.dst, buffer.nbytes, "p2p")
            yield dist.isend, buffer, piece.dst

    def _post_all_to_all(self) -> None:
        ranks = sorted({*self.step.src.mesh.ranks, *self.step.dst.mesh.ranks})
        group = self.world.group(ranks)
        if group is None:
            return
        sent = {piece.dst: self._packed(piece) for piece in self.sent}
        sizes_in = [sent[r].numel() if r in sent else 0 for r in ranks]
        expected = {piece.src: piece for piece in self.remote}
        sizes_out = [expected[r].numel if r in expected else 0 for r in ranks]
        flat_in = torch.cat(
            [
                torch.empty(0, dtype=self.dtype, device=self.world.device),
                *(sent[r].reshape(-1) for r in ranks if r in sent),
            ]
        )
        flat_out = torch.empty(sum(sizes_out), dtype=self.dtype, device=self.world.device)
        work = dist.all_to_all_single(flat_out, flat_in, sizes_out, sizes_in, group=group, async_op=True)
        self.world.log.add(self.label, "received", None, flat_out.nbytes, "all_to_all")
        for rank, part in zip(ranks, flat_out.split(sizes_out), strict=True):
            if rank in expected:
                self.buffers[rank] = part.view(pack.piece_shape(expected[rank].index))
        self._keep += [flat_in, flat_out]
        assert work is not None
        self.receives.append((None, work))

    def _receive_buffer(self, piece: Piece) -> Tensor:
        """Where a piece arrives: its place in the result where that is contiguous, else a tensor of its own."""
        assert self.out is not None
        block = None if self.step.summed else pack.view(self.out, self.kept, piece.index)
        if block is not None and block.is_contiguous():
            self.in_place.add(piece.src)
        else:
            block = torch.empty(pack.piece_shape(piece.index), dtype=self.dtype, device=self.world.device)
        self.buffers[piece.src] = self._counted(block, piece)
        return block

    def _packed(self, piece: Piece) -> Tensor:
        assert self.local is not None
        return self._counted(pack.take(self.local, self.held, piece.index), piece)

    def _counted(self, buffer: Tensor, piece: Piece) -> Tensor:
        # A shorter message lands silently in a longer buffer and a longer one ends the process: count before posting.
        if buffer.numel() != piece.numel or not buffer.is_contiguous():
            raise BoundaryError(f"{self.label}: buffer of {buffer.numel()} elements for a piece of {piece.numel}")
        return buffer

    def _put_own(self, piece: Piece) -> None:
        assert self.local is not None
        assert self.out is not None
        part = pack.view(self.local, self.held, piece.index)
        if part is None:
            part = pack.take(self.local, self.held, piece.index)
        pack.put(self.out, self.kept, piece.index, part, add=self.step.summed)

    def receive(self) -> Tensor | None:
        """Wait for what this rank receives and put it in place."""
        if self._done:
            return self.out
        for peer, work in self.receives:
            self._wait(work, peer)
        for piece in self.received if self.step.summed else self.remote:  # in the plan's order
            if piece.src == self.world.rank:
                self._put_own(piece)
            elif piece.src not in self.in_place:
                assert self.out is not None
                pack.put(self.out, self.kept, piece.index, self.buffers[piece.src], add=self.step.summed)
        self._done = True
        return self.out

    def finish(self) -> Tensor | None:
        """Wait for everything."""
        out = self.receive()
        for peer, work in self.sends:
            self._wait(work, peer)
        self._keep.clear()
        return out

    def completed(self) -> bool:
        """Whether all messages have gone through."""
        return all(work.is_completed() for _, work in [*self.receives, *self.sends])

    def _wait(self, work: dist.Work, peer: int | None) -> None:
        whom = "a collective" if peer is None else f"rank {peer}"
        started = time.perf_counter()
        try:
            with self.world.waiting(self.label, whom):
                work.wait(timedelta(seconds=self.world.timeout))
        except RuntimeError as error:
            raise BoundaryError(f"{self.label}: rank {self.world.rank} lost {whom}: {error}") from error
        self.world.log.add_wait(self.label, time.perf_counter() - started)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a tensor of `shape`, as torch computes them (sizes of 0 count as 1)."""
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))
