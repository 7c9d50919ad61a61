"""World: this process's place among all ranks: backend, device, process groups, meshes, log and watchdog."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hetmesh._torch_compat import one_gloo_device, set_group_timeout
from hetmesh.boundary.log import CommunicationLog
from hetmesh.boundary.watchdog import Watchdog, timed_out
from hetmesh.errors import BoundaryTimeout, LayoutError
from hetmesh.layout import MeshSpec

_current: World | None = None


class World:
    """All ranks of the job as this process sees them. One per process; `World.current()` returns it.

    Process groups are built on every rank in the same order and shared by all meshes that need the same ranks, so
    `group` and `device_mesh` must be called on all ranks of the job, in the same order, members or not.

    Attributes:
        rank, size: this process and the number of processes.
        device: where this process computes: `cpu`, or the CUDA device of its local rank.
        timeout: seconds that any single wait may take.
        log: the communication log.
        watchdog: ends the process when a watched operation outlasts twice the timeout.
        ranks_per_node: consecutive ranks that share a node.
    """

    def __init__(self, *, timeout: float = 300.0) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised; call hetmesh.init() or init_process_group first")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.backend = dist.get_backend()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if "nccl" in self.backend else torch.device("cpu")
        )
        self.timeout = timeout
        self.log = CommunicationLog()
        # Waits raise by themselves after the timeout; the watchdog must come second, for what does not raise.
        self.watchdog = Watchdog(2 * timeout)
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._meshes: dict[MeshSpec, DeviceMesh | None] = {}
        self.transfers = 0

    @staticmethod
    def current() -> World:
        """The World of this process, made on first use from the initialised default process group."""
        global _current
        if _current is None:
            _current = World()
        return _current

    def next_tag(self) -> int:
        """A number that is equal on all ranks, as long as all make their transfers in the same order."""
        self.transfers += 1
        return self.transfers

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """The process group of `ranks` in the order given; None on ranks outside it. Collective over all ranks."""
        ranks = tuple(ranks)
        self._check_ranks(ranks)
        if ranks not in self._groups:
            options: dict[str, Any] = {}
            if ranks != tuple(sorted(ranks)):
                # torch sorts the ranks of a group silently, which permutes what collectives return.
                if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                    raise LayoutError(
                        f"ranks {list(ranks)} of a mesh axis are not ascending; torch {torch.__version__} would sort "
                        "them silently: give ascending ranks, or use torch >= 2.13"
                    )
                options["sort_ranks"] = False
            with self.waiting(f"the process group of ranks {list(ranks)}"), one_gloo_device():
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout), **options)
            self._groups[ranks] = group if isinstance(group, dist.ProcessGroup) and self.rank in ranks else None
        return self._groups[ranks]

    def device_mesh(self, spec: MeshSpec) -> DeviceMesh | None:
        """The DeviceMesh of `spec`, the same object for equal specs; None on ranks outside it. Collective."""
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
            with self.watchdog.watching(f"{what}: rank {self.rank}, waiting for {whom}"):
                yield
        except RuntimeError as error:
            if not timed_out(error):
                raise
            raise BoundaryTimeout(f"{what}: rank {self.rank} waited {self.timeout:g} s for {whom}") from error

    def set_timeout(self, timeout: float) -> None:
        """From here on, any single wait may take `timeout` seconds. Call it on every rank, where none waits."""
        self.timeout, self.watchdog.timeout = timeout, 2 * timeout
        for group in self._groups.values():
            if group is not None:
                set_group_timeout(timedelta(seconds=timeout), group)

    def made(self, device_mesh: DeviceMesh) -> bool:
        """Whether this World built `device_mesh`, or it has nothing that torch could have sorted."""
        if any(device_mesh is known for known in self._meshes.values()):
            return True
        spec = MeshSpec.of(device_mesh)
        return all(list(ranks) == sorted(ranks) for axis in spec.axes for ranks in spec.axis_groups(axis))

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        outside = [r for r in ranks if not 0 <= r < self.size]
        if outside:
            raise LayoutError(f"ranks {outside} do not exist: this job has ranks 0-{self.size - 1}")

    def close(self) -> None:
        """Destroy all process groups and stop the watchdog."""
        global _current
        self.watchdog.close()
        self._groups.clear()
        self._meshes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        if _current is self:
            _current = None


def init(*, timeout: float = 300.0, init_timeout: float = 300.0, device: str | None = None) -> World:
    """Join the job that the environment describes (torchrun's variables), or a job of one rank if there are none.

    Args:
        timeout: seconds that any single wait may take before it raises an error that names its boundary.
        init_timeout: seconds to wait for the other ranks to appear.
        device: `cpu` or `cuda`; by default `cuda` where every local rank can have a device of its own.

    Returns:
        The World of this process. `World.close()` ends it.
    """
    global _current
    if _current is not None:
        raise RuntimeError("hetmesh.init() was called twice; close the first World before")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        patience = timedelta(seconds=init_timeout)
        with one_gloo_device():
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=patience)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    _current = World(timeout=timeout)
    return _current


def device_mesh(spec: MeshSpec) -> DeviceMesh | None:
    """`World.current().device_mesh(spec)`: the run-time handle of a MeshSpec; None on ranks outside it.

    Call it on all ranks of the job in the same order, members or not.
    """
    return World.current().device_mesh(spec)
