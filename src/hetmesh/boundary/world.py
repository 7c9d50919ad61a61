"""World: this process's place among all ranks: backend, device, process groups, meshes, log and watchdog."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hetmesh._torch_compat import one_gloo_device, set_group_timeout
from hetmesh.boundary import pending
from hetmesh.boundary.accelerator import Accelerator, Buffers, Cuda
from hetmesh.boundary.backend import Backend, Nccl
from hetmesh.boundary.collective_clock import timed_collective
from hetmesh.boundary.local_peers import LocalPeers
from hetmesh.boundary.log import CommunicationLog
from hetmesh.boundary.meeting import join
from hetmesh.boundary.process_groups import Channel
from hetmesh.boundary.transport import MEMORY
from hetmesh.boundary.watchdog import Watchdog, check_timeout, timed_out
from hetmesh.errors import BoundaryError, BoundaryTimeout, LaunchError, LayoutError
from hetmesh.layout import Layout, MeshSpec

T = TypeVar("T")

_MAX_CLOSING_S = 30.0  # that a rank which is done waits for others on its host to read what it sent

_current: World | None = None


class World:
    """All ranks of the job as this process sees them. One per process; `World.current()` returns it.

    Process groups are built on every rank in the same order and shared by all meshes that need the same ranks, so
    `group` and `device_mesh` must be called on all ranks of the job, in the same order, members or not.

    Args:
        timeout: seconds that any single wait may take.
        backend: how tensors move between processes; by default that of the default process group.
        accelerator: where this process computes; by default the CPU, or with NCCL the current CUDA device.

    Attributes:
        rank, size: this process and the number of processes.
        device: of `accelerator`.
        log: the communication log.
        watchdog: ends the process when something outlasts the timeout that does not raise by itself.
        buffers: memory for packed messages.
        local_peers: ranks with which messages are exchanged through shared memory, once `connect` has found any.
        ranks_per_node: consecutive ranks that share a node.
    """

    def __init__(
        self, *, timeout: float = 300.0, backend: Backend | None = None, accelerator: Accelerator | None = None
    ) -> None:
        if not dist.is_initialized():
            raise LaunchError("torch.distributed is not initialised; call hetmesh.init() or init_process_group first")
        check_timeout(timeout)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.backend = Backend.of(dist.get_backend()) if backend is None else backend
        if accelerator is None:
            on_gpu = self.backend.device_type == "cuda"
            accelerator = Cuda(torch.device("cuda", torch.cuda.current_device())) if on_gpu else Accelerator()
        self.accelerator = accelerator
        self.device = self.accelerator.device
        self.timeout = timeout
        self.log = CommunicationLog()
        self.watchdog = Watchdog(timeout)
        self.buffers = Buffers(self.device)
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.local_peers: LocalPeers | None = None
        self._connected = False
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._channels: dict[Channel, dist.ProcessGroup | None] = {}
        self._meshes: dict[MeshSpec, DeviceMesh | None] = {}
        self.transfers = 0

    @staticmethod
    def current() -> World:
        """The World of this process, made on first use from the initialised default process group. Every rank must
        come here before the first message."""
        global _current
        if _current is None:
            _current = World()
        return _current

    @contextlib.contextmanager
    def as_current(self) -> Iterator[World]:
        """In the body, `World.current()` returns this one, and afterwards what it returned before."""
        global _current
        before, _current = _current, self
        try:
            yield self
        finally:
            _current = before

    def next_tag(self) -> int:
        """A number that is equal on all ranks, as long as all make their transfers in the same order."""
        self.transfers += 1
        return self.transfers

    @property
    def link(self) -> str:
        """What carries messages, for `transport.choose`; equal on all ranks."""
        return MEMORY if self.local_peers is not None and self.local_peers.everyone else self.backend.link

    def connect(self) -> None:
        """Make what the first message between two ranks would make over all of them. Collective; once is enough."""
        if not self._connected:
            self._connected = True
            with self.waiting("the connections between all ranks"):
                self.backend.connect(self.device)
                if self.backend.shares_memory:
                    self.local_peers = LocalPeers.connect(self.rank, self.size)
            if self.local_peers is not None:
                atexit.register(self._close_local_peers)  # a script may end without World.close, while others read

    def _close_local_peers(self) -> None:
        """Release shared memory once other ranks have read what this one sent; after an error without waiting."""
        if self.local_peers is not None:
            atexit.unregister(self._close_local_peers)
            failed = sys.exception() is not None or getattr(sys, "last_type", None) is not None
            timeout = 0.0 if failed else min(self.timeout, _MAX_CLOSING_S)
            unread = self.local_peers.close(timeout)
            self.local_peers = None
            if unread and not failed:
                lost = f"rank {self.rank} ends, and {unread} of its messages were not read within {timeout:g} s"
                print(lost, file=sys.stderr, flush=True)

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """The process group of `ranks` in the order given; None on ranks outside it. Collective over all ranks."""
        ranks = tuple(ranks)
        self._check_ranks(ranks)
        if ranks not in self._groups:
            self._groups[ranks] = self._new_group(ranks, f"the process group of ranks {list(ranks)}")
        return self._groups[ranks]

    def open(self, channels: Iterable[Channel]) -> None:
        """Make the communicators of messages, where the backend needs them. Collective over all ranks, in one order."""
        for channel in channels:
            if self.backend.by_order and channel not in self._channels:
                self._check_ranks(channel.ranks)
                group = self._channels[channel] = self._new_group(channel.ranks, channel)
                if group is not None:
                    with self.waiting(channel):
                        self.backend.connect(self.device, group)

    def channel(self, channel: Channel | None) -> dist.ProcessGroup | None:
        """The group of a channel that was opened; None, which stands for that of all ranks, where there is none."""
        return None if channel is None else self._channels.get(channel)

    def _new_group(self, ranks: tuple[int, ...], what: object) -> dist.ProcessGroup | None:
        options: dict[str, Any] = {}
        if ranks != tuple(sorted(ranks)):
            # torch sorts the ranks of a group silently, which permutes what collectives return.
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise LayoutError(
                    f"ranks {list(ranks)} of a mesh axis are not ascending; torch {torch.__version__} would sort "
                    "them silently: give ascending ranks, or use torch >= 2.13"
                )
            options["sort_ranks"] = False
        if len(ranks) == 1:  # a mesh axis of size 1: nobody else need take part
            options["use_local_synchronization"] = True
        with self.waiting(what), one_gloo_device():
            group = dist.new_group(list(ranks), timeout=self.backend.group_timeout(self.timeout), **options)
        return group if isinstance(group, dist.ProcessGroup) and self.rank in ranks else None

    def device_mesh(self, spec: MeshSpec) -> DeviceMesh | None:
        """The DeviceMesh of `spec`, the same object for equal specs; None on ranks outside it. Collective.

        Raises:
            LayoutError: `spec` is no MeshSpec, or has ranks that this job does not.
        """
        if not isinstance(spec, MeshSpec):
            raise LayoutError(f"device_mesh needs a hetmesh.MeshSpec, got {spec!r} ({type(spec).__name__})")
        if spec not in self._meshes:
            self._check_ranks(spec.ranks)
            mine = []
            for axis in spec.axes:
                for ranks in spec.axis_groups(axis):
                    group = self.group(ranks)
                    if group is not None:
                        mine.append(group)
            self._meshes[spec] = None
            if self.rank in spec:
                self._meshes[spec] = DeviceMesh.from_group(
                    mine if spec.ndim > 1 else mine[0],
                    self.device.type,
                    mesh=torch.tensor(spec.ranks).reshape(spec.sizes),
                    mesh_dim_names=spec.axes,
                )
        return self._meshes[spec]

    @contextlib.contextmanager
    def waiting(self, what: object, whom: str = "the other ranks") -> Iterator[None]:
        """Watch the body, a wait for `whom`, and say what was waited for if it lasts too long.

        Raises:
            BoundaryTimeout: the backend gave up.
        """
        try:
            watched = self.watchdog.watching(f"{what}: rank {self.rank}, waiting for {whom}")
            with watched, timed_collective():
                yield
        except RuntimeError as error:
            if not timed_out(error):
                raise
            raise BoundaryTimeout(f"{what}: {self.waited(whom)}") from error

    def waited(self, whom: str) -> str:
        """What an error says of a wait that took too long."""
        return f"rank {self.rank} waited {self.timeout:g} s for {whom}{pending.hint()}"

    def set_timeout(self, timeout: float) -> None:
        """From here on, any single wait may take `timeout` seconds. Call it on every rank, where none waits.

        Raises:
            LaunchError: it is no number of seconds above 0.
        """
        check_timeout(timeout)
        self.timeout = self.watchdog.timeout = timeout
        for group in (dist.group.WORLD, *self._groups.values(), *self._channels.values()):
            if group is not None:
                set_group_timeout(self.backend.group_timeout(timeout), group)

    def check_layout(self, layout: Layout) -> None:
        """Raise LayoutError unless all ranks of `layout` exist."""
        self._check_ranks(layout.mesh.ranks, f"{layout}: ")

    def made(self, device_mesh: DeviceMesh) -> bool:
        """Whether this World built `device_mesh`, or it has nothing that torch could have sorted."""
        if any(device_mesh is known for known in self._meshes.values()):
            return True
        spec = MeshSpec.of(device_mesh)
        return all(list(ranks) == sorted(ranks) for axis in spec.axes for ranks in spec.axis_groups(axis))

    def _check_ranks(self, ranks: Iterable[int], whose: str = "") -> None:
        outside = [r for r in ranks if not 0 <= r < self.size]
        if outside:
            raise LayoutError(f"{whose}ranks {outside} do not exist: this job has ranks 0-{self.size - 1}")

    def close(self) -> None:
        """Destroy all process groups and stop the watchdog.

        Raises:
            BoundaryError: `hetmesh.backward` was forgotten (and no other error is on its way). All is closed then.
        """
        global _current
        forgotten = pending.drop()
        self.watchdog.close()
        self._groups.clear()
        self._channels.clear()
        self._meshes.clear()
        self._close_local_peers()
        if dist.is_initialized():
            dist.destroy_process_group()
        if _current is self:
            _current = None
        if forgotten and sys.exception() is None:
            raise BoundaryError(f"World.close: {forgotten}")


def init(
    *,
    timeout: float = 300.0,
    init_timeout: float = 300.0,
    device: str | None = None,
    backend: Backend | None = None,
    accelerator: Accelerator | None = None,
) -> World:
    """Join the job that the environment describes (torchrun's variables), or a job of one rank if there are none.

    Args:
        timeout: seconds that any single wait may take before it raises an error that names its boundary.
        init_timeout: seconds to wait for the other ranks to appear.
        device: `cpu` or `cuda`; by default `cuda` where this machine has GPUs.
        backend: how tensors move between processes; by default NCCL on `cuda` and gloo on `cpu`.
        accelerator: where this process computes; by default what `backend` needs.

    Returns:
        The World of this process. `World.close()` ends it.

    Raises:
        LaunchError: there is a World already, this machine has fewer GPUs than local ranks, or a timeout is no number
            of seconds above 0.
    """
    global _current
    check_timeout(timeout)
    check_timeout(init_timeout, "init_timeout")
    if _current is not None:
        raise LaunchError("hetmesh.init() was called twice; close the first World before")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if backend is None and dist.is_initialized():
        backend = Backend.of(dist.get_backend())
    elif backend is None:
        backend = Nccl() if _device_type(device) == "cuda" else Backend()
    if backend.device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        join(backend.name, backend.group_timeout(init_timeout))
    world = _current = World(timeout=init_timeout, backend=backend, accelerator=accelerator)
    world.connect()
    if timeout > init_timeout:  # the default group would give up before the watchdog speaks
        world.set_timeout(timeout)
    world.timeout = world.watchdog.timeout = timeout
    return world


def _device_type(device: str | None) -> str:
    """`cpu` or `cuda`. Raises LaunchError where not every local rank can have a GPU to itself."""
    if device not in (None, "cpu", "cuda"):
        raise LaunchError(f"device {device!r} is unknown; valid are cpu and cuda")
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return "cpu"
    local_size, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if gpus < local_size:
        raise LaunchError(
            f"{local_size} ranks run on this machine, which has {gpus or 'no'} GPU{'s' * (gpus != 1)}: start as many "
            "ranks as there are GPUs, choose device='cpu', or hide the GPUs (CUDA_VISIBLE_DEVICES='')"
        )
    return "cuda"


def device_mesh(spec: MeshSpec) -> DeviceMesh | None:
    """`World.current().device_mesh(spec)`: the run-time handle of a MeshSpec; None on ranks outside it.

    Call it on all ranks of the job in the same order, members or not.
    """
    return World.current().device_mesh(spec)


def reduce_over_ranks(values: Iterable[Tensor | float], world: World) -> list[float]:
    """Sum some scalars over all ranks of the job, in float64. Collective; the host waits for the device, once."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": world.device}
    stacked = torch.stack(
        # a number is filled in on the device: nothing is copied
        [v.detach().to(**options) if isinstance(v, Tensor) else torch.full((), v, **options) for v in values]
    )
    group = world.group(range(world.size))
    started = time.perf_counter()
    with world.waiting("sum of losses and norms over all ranks"):
        dist.all_reduce(stacked, group=group)
        sums = stacked.tolist()
    world.log.agreeing_s += time.perf_counter() - started
    return sums


def gather_over_ranks(values: list[float], world: World, more: Tensor | None = None) -> Tensor:
    """`values` of every rank, then `more` from its device: float64 `[ranks, numbers]` on the CPU. Collective."""
    row = world.accelerator.pinned(torch.tensor(values, dtype=torch.float64)).to(world.device, non_blocking=True)
    row = row if more is None else torch.cat([row, more])
    table = torch.zeros(world.size, len(row), dtype=torch.float64, device=world.device)
    table[world.rank] = row
    with world.waiting("metrics of all ranks"):
        dist.all_reduce(table, group=world.group(range(world.size)))
        return table.cpu()


def gather_objects(value: T, world: World, what: str = "") -> list[T]:
    """`value` of every rank. Collective over all ranks of the job. `what` they wait for; empty: the caller watches."""
    values: list[Any] = [None] * world.size
    with world.waiting(what) if what else contextlib.nullcontext():
        dist.all_gather_object(values, value, group=world.group(range(world.size)))
    return values
