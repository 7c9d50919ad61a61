"""Ranks of one host: letters, who can be reached, ends that are missing, and real transfers."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hetmesh.boundary import World, redistribute
from hetmesh.boundary.inbox import Inbox, Letter, Outbox
from hetmesh.boundary.neighbours import Neighbours, Offer, _life, _offer, _outbox, sees
from hetmesh.boundary.shared_memory import Outgoing, Slot
from hetmesh.errors import BoundaryError
from hetmesh.layout import Layout, MeshSpec


def letter(source=0, tag=1, place=0):
    return Letter(source, tag, Slot(0, 3, place), 7)


@pytest.fixture
def inbox():
    inbox = Inbox()
    yield inbox
    inbox.close()


def test_letters_wait_until_they_are_asked_for_and_keep_their_order(inbox):
    outbox = Outbox(os.getpid(), inbox.file)
    sent = [letter(source, tag, place) for source, tag, place in [(0, 1, 0), (1, 1, 1), (0, 2, 2), (0, 1, 3)]]
    for each in sent:
        outbox.post(each, 1.0, inbox.collect)
    assert inbox.wait(0, 2, 1.0, None) == sent[2]
    assert inbox.wait(0, 1, 1.0, None) == sent[0]
    assert inbox.wait(0, 1, 1.0, None) == sent[3]
    assert inbox.find(0, 1) is None
    assert inbox.wait(1, 1, 1.0, None) == sent[1]
    outbox.close()


def test_thousands_of_letters_arrive_whole(inbox):
    """A full pipe makes the sender empty its own inbox, which is the same one here."""
    outbox = Outbox(os.getpid(), inbox.file)
    for place in range(5000):
        outbox.post(letter(place=place), 5.0, inbox.collect)
    assert [inbox.wait(0, 1, 1.0, None).slot.place for _ in range(5000)] == list(range(5000))
    outbox.close()


def test_an_inbox_that_nobody_empties_is_a_timeout(inbox):
    outbox = Outbox(os.getpid(), inbox.file)

    def fill():
        for _ in range(5000):
            outbox.post(letter(), 0.05, lambda: None)

    with pytest.raises(RuntimeError, match="timed out"):
        fill()
    outbox.close()


def test_a_letter_that_does_not_come_is_a_timeout(inbox):
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 s"):
        inbox.wait(0, 1, 0.05, None)


def test_the_end_of_a_process_ends_the_wait_for_it(inbox):
    """Long before the timeout; what it sent before it ended still counts."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = _life(child.pid)
    threading.Timer(0.2, child.send_signal, [signal.SIGKILL]).start()
    with pytest.raises(RuntimeError, match="has ended"):
        inbox.wait(0, 1, 60.0, life)
    child.wait()
    outbox = Outbox(os.getpid(), inbox.file)
    outbox.post(letter(), 1.0, inbox.collect)
    assert inbox.wait(0, 1, 60.0, life) == letter()
    outbox.close()
    os.close(life)


def test_who_is_on_another_host_or_in_another_container_is_not_reached():
    inbox, mine = _offer()
    try:
        assert sees(mine, mine)
        for boot, process, token in [
            ("another boot", mine.process, mine.token),
            (mine.boot, mine.process, b"a process of the same number"),
            (mine.boot, 2**22 + 1, mine.token),  # no such process here
        ]:
            assert not sees(mine, Offer(boot, process, mine.token_file, token, mine.inbox_file))
    finally:
        os.close(mine.token_file)
        inbox.close()


def test_a_system_without_such_memory_sends_all_by_gloo(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert _offer() == (None, None)


def test_who_cannot_open_more_files_stays_on_gloo(monkeypatch):
    inbox, mine = _offer()
    try:
        _outbox(mine, mine).close()
        monkeypatch.setattr(Outbox, "__init__", out_of_handles)
        assert _outbox(mine, mine) is None
        assert _outbox(None, mine) is _outbox(mine, None) is None
    finally:
        os.close(mine.token_file)
        inbox.close()


def out_of_handles(*_):
    raise OSError(24, "Too many open files")


def without_memory(rank):
    world = World.current()
    world.connect()
    src, dst = (Layout(MeshSpec.make([r], dp=1), (Shard(0),)) for r in (0, 1))
    if rank:
        return None
    take, Outgoing.take = Outgoing.take, out_of_handles
    try:
        redistribute(torch.zeros(4), dst, src=src, shape=(4,), dtype=torch.float32, requires_grad=False)
    except BoundaryError as error:
        return str(error)
    finally:
        Outgoing.take = take


@pytest.mark.slow
def test_no_more_memory_is_an_error_that_names_the_boundary(pool4):
    said = pool4.run(without_memory)[0]
    assert "no memory to share with rank 1 for 4 elements" in said


def test_one_rank_has_no_neighbours():
    assert Neighbours.connect(0, 1) is None


SRC = Layout(MeshSpec.make([0, 1], dp=2), (Shard(0),))
DST = Layout(MeshSpec.make([2, 3, 0, 1], dp=2, tp=2), (Shard(0), Replicate()))


def either_way(rank, near):
    """Sixteen rows of 64 KiB from two ranks to all four, three times."""
    world = World.current()
    world.connect()
    assert world.neighbours.everyone
    neighbours, world.neighbours = world.neighbours, world.neighbours if near else None
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
        world.neighbours = neighbours
    return torch.stack(results), world.log.messages, sum(out.bytes for out in neighbours._outgoing.values())


@pytest.mark.slow
def test_large_messages_are_the_same_and_counted_the_same_either_way(pool4):
    by_gloo, by_memory = (pool4.run(either_way, near) for near in (False, True))
    for (a, counted, _), (b, counted_too, _) in zip(by_gloo, by_memory, strict=True):
        assert torch.equal(a, b)
        assert [(m.op, m.peer, m.bytes) for m in counted] == [(m.op, m.peer, m.bytes) for m in counted_too]
    assert all(size for *_, size in by_memory[:2])  # it was used


SCRIPT = textwrap.dedent("""
    import os, sys, time, torch, hetmesh
    from hetmesh import Layout, MeshSpec
    from hetmesh.errors import BoundaryError
    from torch.distributed.tensor import Shard
    world = hetmesh.init()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    src, dst = (Layout(MeshSpec.make([r], dp=1), (Shard(0),)) for r in (0, 1))
    x = torch.arange(1000.0) if world.rank == 0 else None
    if world.rank == 1:
        time.sleep(1.0)  # rank 0 has nothing left to do but to wait for this
    y = hetmesh.redistribute(x, dst, src=src, shape=(1000,), dtype=torch.float32, requires_grad=False)
    if world.rank == 1:
        assert y.to_local().sum() == 499500, y
        print("arrived", flush=True)
""")


@pytest.mark.slow
def test_a_rank_whose_script_ends_waits_until_its_messages_are_read(tmp_path):
    """Also where torchrun has started it again: the ranks meet, though its store still has addresses of the first."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1"]
    run.append(str(script))
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("arrived") == 1


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
def test_messages_that_nobody_reads_are_told_and_their_reader_hears_why(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNREAD)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    run.append(str(tmp_path / "closed"))
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "rank 0 ends, and 1 of its messages were not read within 1 s" in done.stderr
    assert "rank 0 ended before its message was read" in done.stdout
