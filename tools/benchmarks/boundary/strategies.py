"""Three ways to move a tensor between layouts: the plan, and the two that other systems use.

All are set up before any time is taken: plans, groups, message lists. `run` returns this rank's share, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.boundary import pack
from benchmarks.boundary.scenarios import LANE_AXES, Transfer
from hetmesh.boundary import Exchange, Label, World
from hetmesh.boundary.transport import choose
from hetmesh.layout import Intervals, Layout, plan_gradient, plan_transfer
from hetmesh.layout.intervals import coalesce, extent

Index = tuple[Intervals, ...]
Message = tuple[int, int, Index]
"""Source rank, destination rank, what is sent."""


class Strategy(Protocol):
    """A way to carry out a transfer, ready to run."""

    def run(self, local: Tensor | None) -> Tensor | None:
        """Move: this rank's share of the source layout to its share of the destination's."""
        ...


class Planned:
    """hetmesh: the exact plan, by the transport that hetmesh chooses (or the one given)."""

    def __init__(self, world: World, transfer: Transfer, transport: str = "auto") -> None:
        self.world = world
        forward = transfer.direction == "forward"
        make: Callable = plan_transfer if forward else plan_gradient
        self.label = Label(transfer.name, 0, "forward" if forward else "backward")
        self.plan = make(transfer.shape, transfer.src, transfer.dst, ranks_per_node=world.ranks_per_node)
        self.transport = choose(self.plan, world.backend.name, transport)
        for step in self.plan.steps:
            world.group(sorted({*step.src.mesh.ranks, *step.dst.mesh.ranks}))
        if self.transport == "dtensor":
            world.device_mesh(transfer.src.mesh)

    def run(self, local: Tensor | None) -> Tensor | None:
        """One exchange, as the runtime does it."""
        tag = self.world.next_tag()
        exchange = Exchange(self.world, self.plan, local, torch.float32, self.label, transport=self.transport, tag=tag)
        return exchange.start().finish()


class Bare:
    """The messages of hetmesh's plan and nothing else: the same pieces, packed beforehand, by `isend` and `irecv`.

    What is sent lies packed before any time is taken; each message is received into a new tensor, as a result must be.
    Nothing is packed, put in place, kept locally or summed, and no result is made: with the same messages nobody who
    delivers one can be faster.
    """

    def __init__(self, world: World, transfer: Transfer) -> None:
        self.world = world
        rank, size = world.rank, world.size
        self.steps = []
        for step in Planned(world, transfer).plan.steps:
            receives = [(p.src, p.numel) for p in step.received(rank) if p.src != rank]
            sends = [(p.dst, torch.full((p.numel,), float(rank))) for p in step.sent(rank)]
            # Peers in rotated order, so that the ranks do not all send to the same one first.
            sends.sort(key=lambda message: (message[0] - rank) % size)
            self.steps.append((receives, sends))

    @property
    def messages(self) -> int:
        """How many this rank sends and receives."""
        return sum(len(messages) for step in self.steps for messages in step)

    def run(self, local: Tensor | None) -> list[tuple[int, Tensor]]:
        """Post receives, then sends; wait. A Partial source's summands come first, then what has been summed.

        Returns:
            What arrived: source rank and message.
        """
        arrived = []
        for receives, sends in self.steps:
            tag = self.world.next_tag()
            buffers = [(peer, torch.empty(numel)) for peer, numel in receives]
            works = [dist.irecv(buffer, peer, tag=tag) for peer, buffer in buffers]
            works += [dist.isend(buffer, peer, tag=tag) for peer, buffer in sends]
            for work in works:
                assert work is not None
                work.wait()
            arrived += buffers
        return arrived


class GatherBroadcast:
    """The whole tensor is gathered on the first source rank, broadcast to all destination ranks, and sliced there."""

    def __init__(self, world: World, transfer: Transfer) -> None:
        self.world, self.transfer, self.rank = world, transfer, world.rank
        self.reduce = _Reduction(world, transfer.src)
        self.root = transfer.src.mesh.ranks[0]
        everything = tuple(((0, n),) if n else () for n in transfer.shape)
        held = _held(transfer)
        self.gather = _Messages(
            world, [(r, self.root, index) for r, index in held.items()], held, {self.root: everything}
        )
        self.group = world.group(sorted({self.root, *transfer.dst.mesh.ranks}))
        self.everything = everything

    def run(self, local: Tensor | None) -> Tensor | None:
        """Gather, broadcast, slice."""
        transfer = self.transfer
        if self.rank in transfer.src.mesh:
            local = self.reduce.run(local)
        whole = self.gather.run(local)
        if self.group is None:
            return None
        if whole is None:
            whole = torch.empty(transfer.shape)
        dist.broadcast(whole, self.root, group=self.group)
        if self.rank not in transfer.dst.mesh:
            return None
        return _slice(whole, self.everything, transfer.dst.intervals(transfer.shape, self.rank))


class LeaderBroadcast:
    """Each destination lane has a leader that receives the lane's tensor; it broadcasts over the lane, which slices.

    Megatron-LM's bridge between modules on different ranks does this.
    """

    def __init__(self, world: World, transfer: Transfer) -> None:
        self.world, self.transfer, self.rank = world, transfer, world.rank
        self.reduce = _Reduction(world, transfer.src)
        dst, shape = transfer.dst, transfer.shape
        held, kept = _held(transfer), {}
        self.lane: tuple[int, ...] = ()
        self.index: Index = ()
        self.group = None
        for ranks in _lanes(dst):
            shares = [dst.intervals(shape, r) for r in ranks]
            lane = tuple(coalesce(sorted({i for share in shares for i in share[dim]})) for dim in range(len(shape)))
            kept[ranks[0]] = lane
            group = world.group(ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                self.lane, self.index, self.group = ranks, lane, group
        pieces = [(s, d, _overlap(index, lane)) for s, index in held.items() for d, lane in kept.items()]
        self.messages = _Messages(world, [p for p in pieces if all(p[2])], held, kept)

    def run(self, local: Tensor | None) -> Tensor | None:
        """Send to the leaders, broadcast in the lanes, slice."""
        if self.rank in self.transfer.src.mesh:
            local = self.reduce.run(local)
        lane = self.messages.run(local)
        if self.rank not in self.lane:
            return None
        if lane is None:
            lane = torch.empty(pack.piece_shape(self.index))
        if self.group is not None and lane.numel():
            dist.broadcast(lane, self.lane[0], group=self.group)
        return _slice(lane, self.index, self.transfer.dst.intervals(self.transfer.shape, self.rank))


class _Reduction:
    """Summands of a Partial layout to the rank at coordinate 0 of the Partial axes."""

    def __init__(self, world: World, layout: Layout) -> None:
        self.world, self.group, self.first = world, None, -1
        if not layout.partial_axes:
            return
        for ranks in _split_by(layout, [i for i in range(layout.mesh.ndim) if i not in layout.partial_axes]):
            group = world.group(ranks)
            if world.rank in ranks:
                self.group, self.first = group, ranks[0]

    def run(self, local: Tensor | None) -> Tensor | None:
        if self.group is None or local is None:
            return local
        total = local.clone()
        dist.reduce(total, self.first, group=self.group)
        return total


class _Messages:
    """Point-to-point messages, all posted at once; straight into place where the place is contiguous.

    Args:
        held, kept: what each source and destination rank has, per tensor dim.
    """

    def __init__(
        self, world: World, messages: Sequence[Message], held: dict[int, Index], kept: dict[int, Index]
    ) -> None:
        self.world, self.rank, self.held, self.kept = world, world.rank, held, kept
        self.sends = [m for m in messages if m[0] == self.rank and m[1] != self.rank]
        self.receives = [m for m in messages if m[1] == self.rank and m[0] != self.rank]
        self.own = [m for m in messages if m[0] == m[1] == self.rank]

    def run(self, local: Tensor | None) -> Tensor | None:
        out, ops, late, tag = None, [], [], self.world.next_tag()
        if self.rank in self.kept:
            out = torch.empty(pack.piece_shape(self.kept[self.rank]))
            for peer, _, index in self.receives:
                buffer = pack.view(out, self.kept[self.rank], index)
                if buffer is None or not buffer.is_contiguous():
                    buffer = torch.empty(pack.piece_shape(index))
                    late.append((index, buffer))
                ops.append(dist.P2POp(dist.irecv, buffer, peer, tag=tag))
        for _, peer, index in self.sends:
            assert local is not None
            ops.append(dist.P2POp(dist.isend, pack.take(local, self.held[self.rank], index), peer, tag=tag))
        works = dist.batch_isend_irecv(ops) if ops else []
        for _, _, index in self.own:
            assert out is not None
            assert local is not None
            part = pack.take(local, self.held[self.rank], index)
            pack.put(out, self.kept[self.rank], index, part, add=False)
        for work in works:
            work.wait()
        for index, buffer in late:
            assert out is not None
            pack.put(out, self.kept[self.rank], index, buffer, add=False)
        return out


def _slice(whole: Tensor, held: Index, index: Index) -> Tensor:
    """A share of a larger block: a view where it is contiguous, nobody need pay for a copy then."""
    if not all(index):
        return whole.new_empty(pack.piece_shape(index))
    return pack.take(whole, held, index)


def _held(transfer: Transfer) -> dict[int, Index]:
    """What the first of the replicas (and of the summands) of every region holds."""
    src = transfer.src
    free = {*src.replica_axes, *src.partial_axes}
    firsts = [ranks[0] for ranks in _split_by(src, [i for i in range(src.mesh.ndim) if i not in free])]
    held = {rank: src.intervals(transfer.shape, rank) for rank in firsts}
    return {rank: index for rank, index in held.items() if math.prod(map(extent, index))}


def _lanes(layout: Layout) -> list[tuple[int, ...]]:
    return _split_by(layout, [i for i, axis in enumerate(layout.mesh.axes) if axis in LANE_AXES])


def _split_by(layout: Layout, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Ranks that share their coordinates along `axes`, one tuple per such coordinate, in mesh order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank) or ()
        groups.setdefault(tuple(coordinate[i] for i in axes), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _overlap(a: Index, b: Index) -> Index:
    return tuple(
        tuple(sorted((max(p, r), min(q, s)) for p, q in x for r, s in y if max(p, r) < min(q, s)))
        for x, y in zip(a, b, strict=True)
    )
