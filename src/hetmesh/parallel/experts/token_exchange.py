"""How routed tokens travel: one small exchange of sizes, whose result the host reads, and all-to-alls of rows.

These are the only shapes that are not planned (they follow from the weights of the router), and reading the sizes is
the only time that the host waits for the device inside a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetmesh.boundary import Label, World
from hetmesh.cost.expert_costs import reached_share
from hetmesh.parallel.linear import Collective

TRANSPORT = "all_to_all"


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks along `ep` that share one set of experts, and the name of their traffic.

    Attributes:
        world: this process; None outside of any job.
        group: these ranks in mesh order; None where there is one.
        own: the coordinate of this rank.
    """

    world: World | None
    group: dist.ProcessGroup | None
    ranks: int
    own: int
    name: str


@dataclass(frozen=True)
class RoutedCounts:
    """What one rank sends, gets and computes in one block; on the host.

    Attributes:
        sent, received: rows, by rank.
        experts: rows that each expert of this rank computes.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    experts: tuple[int, ...]


def count_choices(places: Tensor, ranks: int, count: int) -> tuple[Tensor, Tensor]:
    """What goes where; nothing is read.

    Args:
        places: int64 `[tokens, chosen]`: where the chosen experts lie.
        count: experts altogether; rank r holds the r-th `count / ranks` places.

    Returns:
        bool `[tokens, ranks]`: which rank gets which token; and int64 `[ranks, 1 + count / ranks]`: per rank the rows
        that it gets, and how many of them each of its experts computes.
    """
    each = count // ranks
    wanted = torch.zeros(len(places), ranks, dtype=torch.bool, device=places.device)
    wanted.scatter_(1, places // each, True)
    flat = places.reshape(-1)
    pairs = flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat)).view(ranks, each)
    return wanted, torch.cat([wanted.sum(0, dtype=torch.int64)[:, None], pairs], 1)


def even_counts(tokens: int, chosen: int, ranks: int, each: int) -> RoutedCounts:
    """What a rank sends, gets and computes where every choice is as likely as any other, and all ranks have as many
    tokens; rows are rounded up. `each`: experts of a rank."""
    rows, pairs = math.ceil(tokens * reached_share(each * ranks, chosen, ranks)), tokens * chosen
    return RoutedCounts((rows,) * ranks, (rows,) * ranks, tuple((pairs + i) // each for i in range(each)))


def start_counts(peers: ExpertRanks, counts: Tensor, shape: torch.Size, microbatch: int) -> Callable[[], RoutedCounts]:
    """Begin to tell the other ranks what they get; what this returns waits, and reads.

    Args:
        counts: of `count_choices`. A dry run's device does not have them: there routing is taken to be even.
        shape: of the choices, `(tokens, chosen)`.
    """
    label, one_each = Label(f"{peers.name} sizes", microbatch), (1,) * peers.ranks
    arrive = None if peers.ranks == 1 else _start(counts, one_each, one_each, peers, label)

    def finish() -> RoutedCounts:
        there, here = torch.stack([counts, counts if arrive is None else arrive()]).tolist()
        if peers.world is not None and not peers.world.accelerator.computes:
            tokens, chosen = shape
            return even_counts(tokens, chosen, peers.ranks, counts.shape[1] - 1)
        experts = tuple(map(sum, zip(*(row[1:] for row in here), strict=True)))
        return RoutedCounts(tuple(row[0] for row in there), tuple(row[0] for row in here), experts)

    return finish


def send_rows(
    rows: Tensor, choices: Tensor, counts: RoutedCounts, peers: ExpertRanks, microbatch: int
) -> tuple[Tensor, Tensor]:
    """Rows to the ranks that they were copied for (`route_to_ranks`), in one message per rank with their choices.

    Args:
        rows: `[sent, width]`; has a gradient.
        choices: int16 `[sent, chosen]`; has none.

    Returns:
        The same of the rows that this rank gets, rank by rank.
    """
    return _Send.apply(rows, choices, counts.sent, counts.received, peers, microbatch)


def return_rows(rows: Tensor, counts: RoutedCounts, peers: ExpertRanks, microbatch: int) -> Tensor:
    """A row for each that this rank got, back to where it came from: the inverse of `send_rows`."""
    there, here = Label(f"{peers.name} sums", microbatch), Label(f"{peers.name} sums", microbatch, "backward")
    back = lambda x: _exchange(x, counts.received, counts.sent, peers, there)  # noqa: E731
    forth = lambda x: _exchange(x, counts.sent, counts.received, peers, here)  # noqa: E731
    return Collective.apply(rows, back, forth)


def sum_choices(choices: Tensor, sharing: dist.ProcessGroup, peers: ExpertRanks, microbatch: int) -> None:
    """Sum how often each expert was chosen over the ranks that share the tokens of samples, in place."""
    world, label = peers.world, Label(f"{peers.name} balance", microbatch)
    assert world is not None
    work = dist.all_reduce(choices, group=sharing, async_op=True)
    assert work is not None
    world.backend.posted([(None, work)], world.watchdog, f"{label}: rank {world.rank}, waiting for a sum of choices")
    with world.waiting(label):
        world.backend.wait(work, world.timeout)
    ranks = sharing.size()
    world.log.add(label, "received", None, 2 * choices.nbytes * (ranks - 1) // ranks, "all_reduce")


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        choices: Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        peers: ExpertRanks,
        microbatch: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.sent, ctx.received, ctx.peers, ctx.microbatch = sent, received, peers, microbatch
        packed = torch.cat([rows, _as_dtype(choices, rows.dtype)], 1)
        got = _exchange(packed, sent, received, peers, Label(f"{peers.name} tokens", microbatch))
        own, theirs = got[:, : rows.shape[1]].contiguous(), got[:, rows.shape[1] :].contiguous()
        of_rows = theirs.view(torch.int16)[:, : choices.shape[1]]
        ctx.mark_non_differentiable(of_rows)
        return own, of_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        label = Label(f"{ctx.peers.name} tokens", ctx.microbatch, "backward")
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.peers, label), None, None, None, None, None


def _as_dtype(choices: Tensor, dtype: torch.dtype) -> Tensor:
    """int16 `[n, chosen]` as bits of `dtype`, filled up to whole elements, so that they travel with the rows."""
    each = dtype.itemsize // 2
    filled = torch.nn.functional.pad(choices, (0, -choices.shape[1] % each))
    return filled.contiguous().view(dtype)


def _exchange(
    rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], peers: ExpertRanks, label: Label
) -> Tensor:
    """Every rank of the group takes part, also with nothing to send or get."""
    return rows.view_as(rows) if peers.ranks == 1 else _start(rows, sent, received, peers, label)()


def _start(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], peers: ExpertRanks, label: Label
) -> Callable[[], Tensor]:
    """Post an all-to-all of rows; what this returns waits for it."""
    world, group = peers.world, peers.group
    assert world is not None
    assert group is not None
    width = math.prod(rows.shape[1:])
    got = rows.new_empty(sum(received), *rows.shape[1:])
    sizes = [n * width for n in received], [n * width for n in sent]
    work = world.backend.all_to_all(got.view(-1), rows.contiguous().view(-1), sizes, 0, group, label)
    world.backend.posted([(None, work)], world.watchdog, f"{label}: rank {world.rank}, waiting for tokens")

    def finish() -> Tensor:
        started = time.perf_counter()
        with world.waiting(label):
            world.backend.wait(work, world.timeout)
        world.log.add_wait(label, time.perf_counter() - started)
        size = (sum(received) - received[peers.own]) * width * rows.itemsize
        world.log.add(label, "received", None, size, TRANSPORT)
        return got

    return finish
