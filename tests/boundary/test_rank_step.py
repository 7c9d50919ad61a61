"""What ranks do in a step, by `Exchange`, for all of them in one process: a backend that keeps messages in a dict."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import assume, given, settings
from torch.distributed.tensor import Shard

from hetmesh._torch_compat import fake_process_group
from hetmesh.boundary import Backend, Exchange, Label, World
from hetmesh.boundary.rank_step import rank_step
from hetmesh.layout import Layout, MeshSpec, RowSplit, plan_gradient, plan_transfer
from hetmesh.testing import executor, strategies

SIZE = 4


@dataclass(frozen=True)
class Mailbox(Backend):
    """Messages of several ranks in one process, told apart by their buffers' owner; what is read too early is NaN."""

    sent: dict = field(default_factory=dict)
    rank: list = field(default_factory=lambda: [0])  # whose turn it is

    def post(self, receives, sends, tag, group, what):
        for peer, buffer in sends:
            self.sent[self.rank[0], peer] = buffer.clone()
        receives = [(peer, (self.rank[0], peer, buffer.fill_(torch.nan))) for peer, buffer in receives]
        return receives, []

    def wait(self, work, timeout):
        rank, peer, buffer = work
        buffer.copy_(self.sent.pop((peer, rank)).view_as(buffer))


@pytest.fixture(scope="module")
def world():
    with fake_process_group(SIZE):
        world = World(backend=Mailbox())
        yield world
        world.watchdog.close()


def carry_out(world, plan, local):
    """The result of every rank; as ranks would, all post before any waits."""
    label, exchanges = Label("a->b"), {}
    for rank in range(SIZE):
        world.rank = world.backend.rank[0] = rank
        exchanges[rank] = Exchange(world, plan, local.get(rank), torch.float64, label, transport="p2p").start()
    got = {}
    for rank, exchange in exchanges.items():
        world.rank = rank
        got[rank] = exchange.finish()
    assert not world.backend.sent
    return {rank: tensor for rank, tensor in got.items() if tensor is not None}


@pytest.mark.slow
@settings(max_examples=100)
@given(pair=strategies.layout_pairs(SIZE))
def test_ranks_do_what_plans_say(world, pair):
    there = plan_transfer(pair.shape, pair.src, pair.dst)
    back = plan_gradient(pair.shape, pair.dst.gradient(), pair.src)
    assume(len(there.steps) == len(back.steps) == 1)
    for plan, layout in ((there, pair.src), (back, pair.dst.gradient())):
        local = executor.draw(layout, pair.shape, seed=1)
        want = executor.execute(plan.steps, local)
        got = carry_out(world, plan, local)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[rank], want[rank]) for rank in want), pair


def test_messages_are_the_place_itself_where_that_is_one_run():
    """Rows go from and to their place; features do not, and share one buffer; one piece of several rows is one part."""
    rows, features = (Layout(MeshSpec.make(range(4), dp=4), (Shard(dim),)) for dim in (0, 1))
    shape = (8, 8)
    moved = Layout(MeshSpec.make([3, 2, 1, 0], dp=4), (Shard(0),))
    there = rank_step(plan_transfer(shape, rows, moved).steps[0], 0)
    assert (there.receives[0].flat, there.sends[0].flat, there.received_packed, there.sent_packed) == (True, True, 0, 0)
    across = rank_step(plan_transfer(shape, rows, features).steps[0], 0)
    assert [part.start for part in across.sends] == [0, 4, 8]
    assert (across.sent_packed, across.received_packed) == (12, 0)  # what arrives are rows of a narrower tensor
    assert [part.peer for part in across.sends] == [1, 2, 3]  # rank 1 begins with 2
    assert [part.peer for part in rank_step(plan_transfer(shape, rows, features).steps[0], 1).sends] == [2, 3, 0]
    apart = Layout(MeshSpec.make([1], dp=1), (RowSplit(0, (((0, 1), (6, 7)),)),))
    (part,) = rank_step(plan_transfer(shape, Layout(MeshSpec.make([0], dp=1), (Shard(0),)), apart).steps[0], 0).sends
    assert ([block.offset for block in part.blocks], [block.offset for block in part.packed]) == ([0, 48], [0, 8])


def test_what_a_rank_does_is_made_once():
    layout = Layout(MeshSpec.make(range(2), dp=2), (Shard(0),))
    step = plan_transfer((4, 4), layout, Layout(layout.mesh, (Shard(1),))).steps[0]
    assert rank_step(step, 0) is rank_step(step, 0)
