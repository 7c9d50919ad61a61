"""What NCCL does otherwise, shown on a CPU: stubs that count stand where the backend, its works or the GPUs are."""

import contextlib
import math
import threading
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from hetmesh._torch_compat import fake_process_group
from hetmesh.boundary import Backend, Exchange, Label, Nccl, World, init
from hetmesh.boundary.process_groups import Channel
from hetmesh.boundary.watchdog import GRACE, Watchdog
from hetmesh.boundary.world import _device_type
from hetmesh.errors import LaunchError
from hetmesh.layout import Layout, MeshSpec, plan_transfer

PLAN = plan_transfer((4, 2), *(Layout(MeshSpec.make([rank], a=1), (Replicate(),)) for rank in (1, 0)))  # to rank 0


class Work:
    """Never completes; keeps how it was waited for."""

    def __init__(self):
        self.waits = []

    def wait(self, *timeout):
        self.waits.append(timeout)

    def is_completed(self):
        return False


@dataclass(frozen=True)
class Counting(Nccl):
    """NCCL's ways on the CPU: collectives and batches are counted, nothing is sent."""

    name: str = "fake"
    device_type: str = "cpu"
    connected: list = field(default_factory=list)
    batches: list = field(default_factory=list)
    works: list = field(default_factory=list)

    def connect(self, device, group=None):
        self.connected.append(device)

    def post(self, receives, sends, tag, group, what):
        self.batches.append((list(receives), list(sends)))
        self.works.append(Work())
        return [(None, self.works[-1])], []


@pytest.fixture
def world():
    """Rank 0 of 4 that do not exist."""
    with fake_process_group(4):
        world = World(timeout=10, backend=Counting())
        yield world
        world.watchdog.close()


def receive(world):
    return Exchange(world, PLAN, None, torch.float32, Label("vision->llm", 3), transport="p2p").start()


def test_nccl_makes_its_communicator_by_one_collective_of_all_ranks(monkeypatch):
    """Before any message: the first batch would wait for the ranks without one."""
    sums = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: sums.append(tensor.numel()))
    with fake_process_group(4):
        world = World(backend=Nccl(name="fake", device_type="cpu"))
        world.connect()
        world.connect()
        world.watchdog.close()
    assert sums == [1]


def test_init_connects_before_anything_is_sent():
    with fake_process_group(4):
        backend = Counting()
        world = init(backend=backend, timeout=7, init_timeout=9)
        assert (backend.connected, backend.batches) == ([torch.device("cpu")], [])
        assert world.timeout == world.watchdog.timeout == 7
        with pytest.raises(LaunchError, match="twice"):
            init()
        world.watchdog.close()
        World.current().close()
        with contextlib.suppress(ValueError):
            dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())  # for the context to close


def test_waits_on_nccl_have_no_timeout_of_their_own(world):
    """With one the host would wait: the stream does, and the group has the timeout."""
    receive(world).finish()
    (work,) = world.backend.works
    assert work.waits == [()]
    assert len(world.backend.batches) == 1


def test_waits_on_gloo_have_one():
    work = Work()
    Backend().wait(work, 2.5)
    assert work.waits == [(timedelta(seconds=2.5),)]


def test_the_watchdog_names_a_boundary_whose_message_never_comes(world):
    """The host does not wait, so nothing else would tell; the time counts from posting, as NCCL's does."""
    said, spoke = [], threading.Event()
    world.watchdog = Watchdog(0.05, lambda message: (said.append(message), spoke.set()))
    receive(world)
    assert spoke.wait(10)
    world.watchdog.close()
    assert said == [
        "watchdog: boundary 'vision->llm', microbatch 3, forward: rank 0, waiting for rank 1 did not finish "
        "within 0.05 s"
    ]


def test_the_watchdog_speaks_before_nccl_does(world, monkeypatch):
    """NCCL ends the process when a group's timeout is over; also that of the default group, which carries messages."""
    limits = {}
    monkeypatch.setattr("hetmesh.boundary.world.set_group_timeout", lambda t, group: limits.update({group: t}))
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options["timeout"]))
    world.group([0, 1])
    assert made == [timedelta(seconds=20 + GRACE)]  # twice the 10 s of then
    monkeypatch.undo()
    channel = Channel("an edge", (0, 2))
    world.open([channel])
    monkeypatch.setattr("hetmesh.boundary.world.set_group_timeout", lambda t, group: limits.update({group: t}))
    world.set_timeout(20)
    assert limits == dict.fromkeys((dist.group.WORLD, world.channel(channel)), timedelta(seconds=40 + GRACE))
    assert world.watchdog.timeout + GRACE < 40
    assert len(world.backend.connected) == 1  # made at once, by its members


def test_what_takes_long_on_purpose_is_not_ended():
    said, spoke = [], threading.Event()
    watchdog = Watchdog(0.02, lambda message: (said.append(message), spoke.set()))
    with watchdog.watching("saving", timeout=math.inf), watchdog.watching("inside"):
        assert not spoke.wait(0.3)
    with watchdog.watching("a step"):
        assert spoke.wait(10)
    watchdog.close()
    assert said == ["watchdog: a step did not finish within 0.02 s"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "wanted", "found"),
    [(4, 4, None, "cuda"), (0, 4, None, "cpu"), (2, 4, "cpu", "cpu"), (2, 4, None, "2 GPUs"), (1, 2, "cuda", "1 GPU:")],
)
def test_fewer_gpus_than_ranks_are_an_error_and_not_the_cpu(monkeypatch, gpus, ranks, wanted, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if "GPU" not in found:
        assert _device_type(wanted) == found
    else:
        with pytest.raises(LaunchError, match=rf"{ranks} ranks run on this machine, which has {found}"):
            _device_type(wanted)
