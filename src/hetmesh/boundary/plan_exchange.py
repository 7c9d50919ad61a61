"""Exchange: one TransferPlan carried out on this rank, by messages, an all-to-all or DTensor's own redistribution."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hetmesh.boundary.log import Label
from hetmesh.boundary.rank_step import contiguous_stride, rank_step
from hetmesh.boundary.step_messages import StepMessages
from hetmesh.boundary.transport import choose
from hetmesh.boundary.world import World
from hetmesh.errors import BoundaryError
from hetmesh.layout import TransferPlan, TransferStep


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
        group: the communicator of its messages, on a backend that matches by order (`World.channel`); None: that of
            all ranks.

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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.world, self.plan, self.label, self.dtype = world, plan, label, dtype
        self._tag, self._group = tag, group
        self.transport = choose(plan, world.link, transport)
        self._check_local(local)
        self._local = local
        self._result: Tensor | None = None
        self._messages: StepMessages | None = None

    def _check_local(self, local: Tensor | None) -> None:
        want = rank_step(self.plan.steps[0], self.world.rank).source_shape
        if (local is None) != (want is None):
            need = "is not in the source mesh and must pass None" if want is None else "must pass its share"
            raise BoundaryError(f"{self.label}: rank {self.world.rank} {need} of {self.plan.src}")
        if local is None:
            return
        if local.shape != want or local.dtype != self.dtype or local.device.type != self.world.device.type:
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
            local = self._begin(step, local).finish()
        self._messages = self._begin(self.plan.steps[-1], local)
        self._local = None
        return self

    def finish(self) -> Tensor | None:
        """Wait for every message. Returns this rank's share of the destination layout, or None outside it."""
        if self._messages is not None:
            self._result = self._messages.finish()
            self._messages = None
        return self._result

    def finish_receiving(self) -> Tensor | None:
        """Like `finish`, but leaves sends in flight; `finish` must follow before the step ends."""
        if self._messages is not None:
            self._result = self._messages.receive()
        return self._result

    def completed(self) -> bool:
        """Whether nothing is in flight any more, without waiting."""
        return self._messages is None or self._messages.completed()

    def _begin(self, step: TransferStep, local: Tensor | None) -> StepMessages:
        collective = self.transport == "all_to_all"
        return StepMessages(
            self.world, step, local, self.dtype, self.label, tag=self._tag, group=self._group, collective=collective
        )

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
        with self.world.waiting(self.label):
            result = source.redistribute(mesh, self.plan.dst.torch_placements).to_local()
        self.world.log.add_wait(self.label, time.perf_counter() - started)
        size = self.plan.bytes_received(self.world.rank, self.dtype.itemsize)
        self.world.log.add(self.label, "received", None, size, "dtensor")
        return result
