"""Emulated NCCL finds what NCCL would hang on or get wrong: each shown by code that breaks one rule."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from hetmesh.boundary import Backend, Exchange, Label, World
from hetmesh.boundary.process_groups import Channel
from hetmesh.boundary.watchdog import Watchdog
from hetmesh.errors import BoundaryError, HetmeshError
from hetmesh.layout import Layout, MeshSpec, plan_transfer
from hetmesh.testing.emulated_nccl import EmulatedNccl, emulated_world
from hetmesh.testing.executor import scatter
from hetmesh.testing.in_flight import compare_collectives, stuck

pytestmark = pytest.mark.slow

PATIENCE = 1.0  # seconds; only what would hang takes so long


def one(rank):
    return Layout(MeshSpec.make([rank], a=1), (Replicate(),))


def move(world, source, destination, name, channel, *, rows=4, transport="p2p"):
    """Begin to bring `[rows, 2]` from one rank to another; every rank may call it."""
    plan = plan_transfer((rows, 2), one(source), one(destination))
    local = torch.full((rows, 2), float(source + 1)) if world.rank == source else None
    group = world.channel(channel)
    return Exchange(
        world, plan, local, torch.float32, Label(name, 3), transport=transport, tag=len(name), group=group
    ).start()


def opened(world, *channels):
    world.open(channels)
    return channels[0]


def said(function, world):
    """What goes wrong in a step, if anything does."""
    try:
        with world.backend.step() if isinstance(world.backend, EmulatedNccl) else torch.enable_grad():
            return function()
    except HetmeshError as error:
        return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, eq=False)
class NobodyConnects(EmulatedNccl):
    """All messages on the group of all ranks, whose communicator the first of them makes: as hetmesh once did."""

    by_order: bool = False

    def connect(self, device, group=None):
        pass


def first_batch(rank, broken):
    """Rank 1 sends to rank 2, others have no message."""
    with emulated_world(NobodyConnects(patience=PATIENCE) if broken else EmulatedNccl()) as world:
        channel = opened(world, Channel("vision->llm", (0, 1, 2, 3)))
        if rank not in (1, 2):
            return None
        try:
            move(world, 1, 2, "vision->llm", channel).finish()
        except BoundaryError as error:
            return str(error)


def test_a_rank_without_messages_in_the_first_batch(pool4):
    assert pool4.run(first_batch, False) == [None] * 4
    told = pool4.run(first_batch, True)
    assert told[0] is told[3] is None
    for rank in (1, 2):
        assert told[rank].startswith(
            f"boundary 'vision->llm', microbatch 3, forward: rank {rank} lost rank {3 - rank}: "
        )
        assert "all of them must come to make it, and within 1 s ranks 0, 3 did not" in told[rank]


@dataclass(frozen=True, eq=False)
class NeverWaits(EmulatedNccl):
    """Takes what is posted for what is there."""

    def wait(self, work, timeout):
        pass


def without_waits(rank, reads, names):
    """In a step, and outside of one where nobody watches; on the way the buffers hold what is no number."""
    with emulated_world(NeverWaits(patience=PATIENCE)) as world:
        channel = opened(world, Channel(names, (0, 1)))

        def step():
            if rank > 1:
                return None
            out = move(world, 0, 1, "vision->llm", channel).finish()
            return out.isnan().all().item() if reads and out is not None else None

        return said(step, world)


def test_an_early_read(pool4):
    told = pool4.run(without_waits, True, "early")
    assert told[1] == (
        "EmulatedError: aten::isnan reads a buffer that has not come yet: boundary 'vision->llm', microbatch 3, "
        "forward (from rank 0) was posted, and nobody has waited for it"
    )


def test_a_missing_wait(pool4):
    told = pool4.run(without_waits, False, "missing")
    for rank, way in enumerate(("to rank 1", "from rank 0")):
        assert told[rank] == (
            f"EmulatedError: rank {rank} never waited for what it posted: boundary 'vision->llm', microbatch 3, "
            f"forward ({way})"
        )


@dataclass(frozen=True, eq=False)
class WaitsOnTheHost(EmulatedNccl):
    """Gives waits a timeout, as gloo needs it."""

    def wait(self, work, timeout):
        Backend.wait(self, work, timeout)


def waits(rank, backend):
    with emulated_world(backend()) as world:
        channel = opened(world, Channel("waits", (0, 1)))
        out = said(lambda: move(world, 0, 1, "a", channel).finish(), world)
        return (None if out is None else out.tolist()), world.backend.counts.timed_waits, world.backend.counts.messages


def test_a_timed_wait_is_counted(pool4):
    """Both bring the rows; one of them lets the host wait."""
    rows = [[1.0, 1.0]] * 4
    for backend, timed in ((EmulatedNccl, 0), (WaitsOnTheHost, 1)):
        assert pool4.run(waits, backend) == [(None, timed, 1), (rows, timed, 1), (None, 0, 0), (None, 0, 0)]


def crossed(rank, case, nccl):
    """Two transfers that both sides begin in different orders; gloo, which has tags, does not mind."""

    def step(world, channel):
        if rank > 1:
            return None
        begun = {"a": (0, 1), "bb": (0, 1) if case == "one way" else (1, 0)}
        if case == "one way":
            order = ("a", "bb") if rank == 0 else ("bb", "a")
        else:  # each receives before it sends: neither message is out of order among those of its direction
            order = ("bb", "a") if rank == 0 else ("a", "bb")
        started = [move(world, *begun[name], name, channel) for name in order]
        return sorted(float(out.mean()) for each in started if (out := each.finish()) is not None)

    if not nccl:
        return step(World.current(), None)
    with emulated_world(EmulatedNccl(patience=PATIENCE)) as world:
        channel = opened(world, Channel(f"crossed {case}", (0, 1)))
        return said(lambda: step(world, channel), world)


@pytest.mark.parametrize("case", ["one way", "both ways"])
def test_a_crossed_order(pool4, case):
    assert pool4.run(crossed, case, False)[:2] == ([[], [1.0, 1.0]] if case == "one way" else [[2.0], [1.0]])
    told = pool4.run(crossed, case, True)
    if case == "one way":
        for rank, (here, there) in enumerate((("a", "bb"), ("bb", "a"))):
            assert (
                f"crossed order, rank 0 -> rank 1: rank {rank} has come to boundary '{here}', microbatch 3, forward "
                f"and rank {1 - rank} to boundary '{there}', microbatch 3, forward" in told[rank]
            )
    else:
        for rank, (here, there) in enumerate((("bb", "a"), ("a", "bb"))):
            assert (
                f"boundary '{here}', microbatch 3, forward (from rank {1 - rank}): rank {rank} has waited" in told[rank]
            )
            assert f"it stands at boundary '{there}', microbatch 3, forward (from rank {rank})" in told[rank]
    assert all("in this step" in each or "done with its step" in each for each in told[2:])


def crossed_channels(rank, agree):
    """Two transfers on channels of their own, which both sides begin in different orders; each channel is in order."""

    def step(world, a, bb):
        if rank > 1:
            return None
        order = (("a", a), ("bb", bb))
        started = [move(world, 0, 1, *each) for each in (order if rank == 0 or agree else order[::-1])]
        return [float(out.mean()) for each in started if (out := each.finish()) is not None]

    with emulated_world(EmulatedNccl()) as world:
        channels = [Channel(f"{name} {agree}", (0, 1)) for name in ("a", "bb")]
        world.open(channels)
        return said(lambda: step(world, *channels), world)


def test_an_order_crossed_between_channels(pool4):
    assert pool4.run(crossed_channels, True)[:2] == [[], [1.0, 1.0]]
    for told in pool4.run(crossed_channels, False):
        assert "crossed order between communicators: rank 0 stands at boundary 'a', microbatch 3, forward" in told
        assert "and waits for rank 1, rank 1 stands at boundary 'bb'" in told


def test_circles_of_ranks_in_the_orders_of_communicators():
    """Of three, no two of which disagree; a batch that is over only when all its messages are."""
    ring = {r: [("next", f"{r}", [((r + 1) % 3, 1)]), ("last", f"{(r - 1) % 3}", [((r - 1) % 3, 0)])] for r in range(3)}
    assert "rank 0 stands at next (communicator 0) and waits for rank 1, rank 1 stands" in stuck(ring)
    assert not stuck({**ring, 1: ring[1][::-1]})
    both = {0: [("x", "w", [(1, 1), (2, 1)]), ("y", "v", [(2, 0)])], 1: [("x", "w", [(0, 0)])]}
    assert not stuck({**both, 2: [("x", "w", [(0, 0)]), ("y", "v", [(0, 1)])]})
    assert "rank 2 stands at y" in stuck({**both, 2: [("y", "v", [(0, 1)]), ("x", "w", [(0, 0)])]})


def unequal(rank):
    with emulated_world(EmulatedNccl(patience=PATIENCE)) as world:
        channel = opened(world, Channel("sizes", (0, 1)))
        return said(lambda: move(world, 0, 1, "a", channel, rows=4 + rank).finish() if rank < 2 else None, world)


def test_messages_of_unequal_size(pool4):
    told = pool4.run(unequal)
    assert "rank 0 -> rank 1: rank 0 has 8 x torch.float32 and rank 1 10 x torch.float32" in told[0]


def test_an_order_of_collectives():
    same = {"tp": ["all_reduce[4]", "all_gather[8, 2]"]}
    compare_collectives(0, {0: same, 1: same, 2: {"dp": []}})
    other = {"tp": ["all_gather[8, 2]", "all_reduce[4]"]}
    with pytest.raises(
        HetmeshError, match=r"group tp: rank 0 had all_reduce\[4\] as collective 0 of the step, and rank 1"
    ):
        compare_collectives(0, {0: same, 1: other})
    with pytest.raises(HetmeshError, match="rank 1 had 1 collectives in the step, and rank 0 2"):
        compare_collectives(1, {0: same, 1: {"tp": ["all_reduce[4]"]}})


TRANSFERS = [
    (Layout(MeshSpec.make([0, 1], dp=2), (Shard(0),)), Layout(MeshSpec.make([2, 3], tp=2), (Shard(1),))),
    (Layout(MeshSpec.make([0, 1, 2, 3], dp=4), (Shard(0),)), Layout(MeshSpec.make([3, 1], tp=2), (Replicate(),))),
    (Layout(MeshSpec.make(range(4), dp=4), (Shard(1),)), Layout(MeshSpec.make(range(4), dp=4), (Shard(0),))),
]


def transfers(rank):
    with emulated_world(EmulatedNccl(delay=0.003, seed=rank)) as world:
        group = world.channel(opened(world, Channel("transfers", (0, 1, 2, 3))))
        value = torch.arange(64.0).reshape(8, 8)

        def step():
            for n, (src, dst) in enumerate(TRANSFERS):
                for transport in ("p2p", "all_to_all"):
                    plan = plan_transfer((8, 8), src, dst)
                    local = scatter(value, src).get(rank)
                    exchange = Exchange(
                        world,
                        plan,
                        local,
                        value.dtype,
                        Label("x"),
                        transport=transport,
                        tag=n,
                        group=group,
                    )
                    out = exchange.start().finish()
                    want = scatter(value, dst).get(rank)
                    assert (out is None) == (want is None)
                    assert out is None or torch.equal(out, want)
            return world.backend.counts.messages

        return said(step, world)


def test_every_transfer_that_keeps_the_rules_arrives_whatever_the_delays(pool4):
    counted = pool4.run(transfers)
    assert all(isinstance(each, int) and each > 8 for each in counted), counted


def over_on_gloo(rank):
    """What a watchdog says, long after, of a collective that was waited for."""
    watchdog = Watchdog(math.inf)
    with emulated_world() as world:
        share = torch.empty(2)
        work = dist.reduce_scatter_tensor(share, torch.ones(8), async_op=True)
        world.backend.posted([(None, work)], watchdog, "gradients")
        world.backend.wait(work, world.timeout)
    watchdog.timeout = 1.0
    return share.tolist(), watchdog._late(math.inf)


def test_collectives_of_gloo_which_never_count_as_over_are_not_late(pool4):
    assert pool4.run(over_on_gloo) == [([4.0, 4.0], None)] * 4
