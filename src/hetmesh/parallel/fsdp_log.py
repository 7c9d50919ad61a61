"""What FSDP sends, in the communication log: counted at the buffers that its collectives fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetmesh._torch_compat import all_gather_single, fsdp_groups, reduce_scatter_single
from hetmesh.boundary.collective_clock import timed_collective
from hetmesh.boundary.log import CommunicationLog, Label
from hetmesh.parallel.fully_shard import sharded_modules


def log_collectives(root: nn.Module, name: str, log: CommunicationLog) -> None:
    """Let `log` count what FSDP gathers and sums inside `root`: `parameters of NAME`, forward, whatever they are
    gathered for, and `gradients of NAME`, backward. Padding counts, which FSDP adds where dim 0 does not divide."""
    gather = _Gather(log, Label(f"parameters of {name}"))
    scatter = _Scatter(log, Label(f"gradients of {name}", direction="backward"))
    for part in sharded_modules(root):
        part.set_custom_all_gather(gather)  # type: ignore[arg-type]
        part.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        for fqn, group in fsdp_groups(part):
            if not fqn and (mesh := group.mesh_info.mesh).ndim > 1:  # HSDP: replicas are its first axis
                part.set_all_reduce_hook(partial(_log_all_reduce, log, scatter.label, mesh.size(0)))


@dataclass(frozen=True)
class _Counted:
    log: CommunicationLog
    label: Label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's own collectives of FSDP do."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.log.add(self.label, "received", None, output_tensor.nbytes - input_tensor.nbytes, "all_gather")
        with timed_collective(gathers=True):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Counted):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.log.add(self.label, "received", None, input_tensor.nbytes - output_tensor.nbytes, "reduce_scatter")
        with timed_collective():
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _log_all_reduce(log: CommunicationLog, label: Label, replicas: int, gradients: Tensor) -> None:
    """Called with gradients that have been summed over replicas."""
    log.add(label, "received", None, 2 * gradients.nbytes * (replicas - 1) // replicas, "all_reduce")
