"""Ranks of one host: headers of messages, who can be reached, ends that are missing, and real transfers."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hetmesh.boundary import World, redistribute
from hetmesh.boundary.local_peers import LocalPeer, LocalPeers, Mailbox, PendingReceive
from hetmesh.boundary.shared_memory import SlotWriter
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, MeshSpec
from support.forked import ranks_of

RANK = 3


@pytest.fixture
def mailbox():
    mailbox = Mailbox(RANK)
    yield mailbox
    mailbox.close()


@pytest.fixture
def peer(mailbox):
    """A rank which is this process itself: what it sends arrives here."""
    peer = LocalPeer(mailbox, mailbox.handle)
    yield peer
    peer.close()


def send(peer, tag=1, value=0.0, numel=1):
    start, message = peer.writer.take(numel, torch.float32)
    message.fill_(value)
    peer.send(tag, start, numel, 1.0)


def received(peer, tag=1, timeout=1.0, numel=1):
    receive = PendingReceive(peer, tag, numel, torch.float32)
    receive.wait(timedelta(seconds=timeout))
    value = receive.message[0].item()
    receive.release()
    return value


def test_messages_wait_until_they_are_asked_for_and_keep_their_order(peer):
    for tag, value in [(1, 0.0), (2, 1.0), (1, 2.0)]:
        send(peer, tag, value)
    assert [received(peer, tag) for tag in (2, 1, 1)] == [1.0, 0.0, 2.0]
    assert not PendingReceive(peer, 1, 1, torch.float32).is_completed()
    assert peer.unread == 0


def test_a_message_that_has_come_is_complete(peer):
    receive = PendingReceive(peer, 1, 1, torch.float32)
    assert not receive.is_completed()
    send(peer, value=5.0)
    assert receive.is_completed()
    receive.wait()  # as long as a timeout may be
    assert receive.message.tolist() == [5.0]


def test_thousands_of_headers_arrive_whole(peer):
    """A full pipe makes the sender empty its own mailbox, which is the same one here."""
    start, _ = peer.writer.take(1, torch.float32)
    for numel in range(5000):
        peer.send(1, start, numel, 5.0)
    peer.mailbox.collect()
    assert [peer.mailbox.pop(RANK, 1).numel for _ in range(5000)] == list(range(5000))


def test_a_mailbox_that_nobody_empties_is_a_timeout(mailbox):
    other = Mailbox(4)
    peer = LocalPeer(mailbox, other.handle)
    start, _ = peer.writer.take(1, torch.float32)

    def fill():
        for _ in range(5000):
            peer.send(1, start, 1, 0.05)

    with pytest.raises(RuntimeError, match="timed out"):
        fill()
    other.close()
    with pytest.raises(RuntimeError, match="has ended"):
        fill()
    peer.close()


def test_a_message_that_does_not_come_is_a_timeout(peer):
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 s"):
        received(peer, timeout=0.05)


def test_a_message_of_another_size_is_refused(peer):
    send(peer, numel=2)
    with pytest.raises(RuntimeError, match="sent 2 elements for 3"):
        received(peer, numel=3)


def test_the_end_of_a_process_ends_the_wait_for_it(peer):
    """Long before the timeout; what it sent before it ended still counts."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.close(peer.process_fd)
    peer.process_fd = os.pidfd_open(child.pid)
    threading.Timer(0.2, child.send_signal, [signal.SIGKILL]).start()
    with pytest.raises(RuntimeError, match="has ended"):
        received(peer, timeout=60.0)
    child.wait()
    send(peer, value=7.0)
    assert received(peer, timeout=60.0) == 7.0
    send(peer)
    assert peer.unread == 0  # nobody will read it


def test_who_is_on_another_host_or_in_another_container_is_not_reached(mailbox):
    assert mailbox.sees(mailbox.handle)
    for other in (
        {"boot_id": "another boot"},
        {"token": b"a process of the same number"},
        {"process": 2**22 + 1},  # no such process here
        {"token_fd": mailbox.read_fd},  # nor is a pipe read
    ):
        assert not mailbox.sees(replace(mailbox.handle, **other))


def connect(monkeypatch, sees_us=True):
    """What rank 0 of 2 finds, and what it tells rank 1, which is this process too."""
    other, told = Mailbox(1), []

    def gather(results, mine):
        results[:] = [mine, frozenset({0} if sees_us else ()) if told else other.handle]
        told.append(mine)

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    try:
        return LocalPeers.connect(0, 2), told
    finally:
        other.close()


def test_two_ranks_of_one_host_find_each_other(monkeypatch):
    found, (handle, reached) = connect(monkeypatch)
    assert [*found.peers] == [*reached] == [1]
    assert (found.everyone, handle.process) == (True, os.getpid())
    assert found.close(0.0) == 0


def test_a_rank_on_another_host_is_known_to_all(monkeypatch):
    """Rank 2; the messages to it go through the backend."""
    other = Mailbox(1)
    answers = iter([[None, other.handle, None], [frozenset({1}), frozenset({0}), frozenset()]])

    def gather(results, _):
        results[:] = next(answers)

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    found = LocalPeers.connect(0, 3)
    assert ([*found.peers], found.everyone) == ([1], False)
    found.close(0.0)
    other.close()


def test_who_is_not_seen_by_the_other_stays_on_gloo(monkeypatch):
    found, (_, reached) = connect(monkeypatch, sees_us=False)
    assert (found, reached) == (None, {1})


def test_a_system_without_such_memory_sends_all_by_gloo(monkeypatch):
    memfd_create, calls = os.memfd_create, []

    def only_the_other(*args):
        calls.append(args)
        return memfd_create(*args) if len(calls) == 1 else out_of_descriptors()

    monkeypatch.setattr(os, "memfd_create", only_the_other)
    assert connect(monkeypatch) == (None, [None, frozenset()])


def test_who_cannot_open_more_files_stays_on_gloo(monkeypatch):
    monkeypatch.setattr(LocalPeer, "__init__", out_of_descriptors)
    found, (_, reached) = connect(monkeypatch)
    assert (found, reached) == (None, frozenset())


def out_of_descriptors(*_):
    raise OSError(24, "Too many open files")


def test_who_closes_waits_until_others_have_read(mailbox):
    peer = LocalPeer(mailbox, mailbox.handle)
    send(peer)
    reader = threading.Timer(0.2, received, [peer])
    reader.start()
    assert LocalPeers(Mailbox(RANK), {RANK: peer}, everyone=True).close(60.0) == 0
    reader.join()


def test_a_forked_child_leaves_memory_and_mailbox_to_its_parent(peer, monkeypatch):
    send(peer, value=3.0)
    peers = LocalPeers(peer.mailbox, {RANK: peer}, everyone=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        assert peers.close(0.0) == 0
    assert received(peer) == 3.0


def test_one_rank_has_no_peers():
    assert LocalPeers.connect(0, 1) is None


def without_memory(rank):
    world = World.current()
    world.connect()
    src, dst = (Layout(MeshSpec.make([r], dp=1), (Shard(0),)) for r in (0, 1))
    if rank:
        return None
    take, SlotWriter.take = SlotWriter.take, out_of_descriptors
    try:
        redistribute(torch.zeros(4), dst, src=src, shape=(4,), dtype=torch.float32, requires_grad=False)
    except BoundaryError as error:
        return str(error)
    finally:
        SlotWriter.take = take


@pytest.mark.slow
def test_no_more_memory_is_an_error_that_names_the_boundary(pool4):
    message = pool4.run(without_memory)[0]
    assert message.startswith("boundary 'redistribute ")
    assert "no memory to share with rank 1 for 4 elements" in message


SRC = Layout(MeshSpec.make([0, 1], dp=2), (Shard(0),))
DST = Layout(MeshSpec.make([2, 3, 0, 1], dp=2, tp=2), (Shard(0), Replicate()))


def either_way(rank, shared_memory):
    """Sixteen rows of 64 KiB from two ranks to all four, three times."""
    world = World.current()
    world.connect()
    assert world.local_peers.everyone
    local_peers, world.local_peers = world.local_peers, world.local_peers if shared_memory else None
    world.log.clear()
    try:
        x = torch.arange(8 * 16384.0).reshape(8, 16384) + rank if rank < 2 else None
        results = []
        for _ in range(3):
            y = redistribute(x, DST, src=SRC, shape=(16, 16384), dtype=torch.float32, requires_grad=False)
            results.append(y.to_local().clone())
            if x is not None:
                x.mul_(2)  # what was sent does not change any more
    finally:
        world.local_peers = local_peers
    return torch.stack(results), world.log.messages, sum(peer.writer.bytes for peer in local_peers.peers.values())


@pytest.mark.slow
def test_large_messages_are_the_same_and_counted_the_same_either_way(pool4):
    by_gloo, by_memory = (pool4.run(either_way, shared_memory) for shared_memory in (False, True))
    for (a, counted, _), (b, counted_too, _) in zip(by_gloo, by_memory, strict=True):
        assert torch.equal(a, b)
        assert [(m.op, m.peer, m.bytes) for m in counted] == [(m.op, m.peer, m.bytes) for m in counted_too]
    assert all(size for *_, size in by_memory[:2])  # it was used


def written_again(rank, src):
    """`redistribute` where a sender writes to memory at once when its reader lets go of it."""
    world, release = World.current(), PendingReceive.release

    def spoiled(self):
        self.message.fill_(torch.nan)
        release(self)

    world.connect()
    assert world.local_peers.everyone
    x = torch.arange(16 * 6.0).reshape(16, 6)[: 8 if src == SRC else 16] if rank < 2 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingReceive, "release", spoiled)
        return redistribute(x, DST, src=src, shape=(16, 6), dtype=torch.float32, requires_grad=False).to_local()


@pytest.mark.slow
def test_memory_is_let_go_only_when_what_lies_there_is_in_place(pool4):
    whole = torch.arange(16 * 6.0).reshape(16, 6)
    sums = Layout(SRC.mesh, (Partial(),))
    for src, expected in ((SRC, torch.cat([whole[:8]] * 2)), (sums, 2 * whole)):
        found = pool4.run(written_again, src)
        first, last = expected.chunk(2)
        for rank, share in zip(DST.mesh.ranks, (first, first, last, last), strict=True):
            assert torch.equal(found[rank], share)


UNREAD = textwrap.dedent("""
    import os, sys, torch, hetmesh
    from hetmesh import Layout, MeshSpec
    from hetmesh.errors import BoundaryError
    from torch.distributed.tensor import Shard
    world = hetmesh.init(timeout=1.0)
    src, dst = (Layout(MeshSpec.make([r], dp=1), (Shard(0),)) for r in (0, 1))
    if world.rank == 0:
        x = torch.arange(1000.0)
        hetmesh.redistribute(x, dst, src=src, shape=(1000,), dtype=torch.float32, requires_grad=False)
        world.close()
        open(sys.argv[1], "w").close()
    else:
        import time
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        try:
            hetmesh.redistribute(None, dst, src=src, shape=(1000,), dtype=torch.float32, requires_grad=False)
        except BoundaryError as error:
            print("said:", error, flush=True)
        os._exit(0)
""")


@pytest.mark.slow
def test_unread_messages_are_reported_and_their_reader_hears_why(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNREAD)
    (_, _, said), (_, heard, _) = ranks_of(script, 2, str(tmp_path / "closed"))
    assert "rank 0 ends, and 1 of its messages were not read within 1 s" in said
    assert "rank 1 lost rank 0: its process ended before its message was read" in heard
