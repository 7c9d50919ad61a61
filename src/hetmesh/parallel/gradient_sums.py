"""Who sums a gradient: over the axes that `gradient_axes` gives, once per step. Sums, never means: the loss is a sum
over targets, scaled once by 1 / (global targets)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from hetmesh.parallel.gradients import local_gradient, local_part, set_local_gradient

BUCKET_BYTES = 64 * 2**20
"""Gradients are packed into messages of about this size: large enough that latency does not count, and small enough
that the packed copy does not either."""


def sum_gradients(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Replace every gradient by its sum over `groups`, one group after another (the axes of a mesh).

    Collective: every rank of a group calls it with corresponding parameters; of DTensors the local parts are summed.
    The messages depend on the parameters only, never on which gradients a rank happens to have: a missing gradient
    counts as zero, and stays None if it is missing on every rank, as in a single process. Frozen parameters are left
    out. Order and packing are fixed, so the result is deterministic.
    """
    for group in groups:
        start_sum(parameters, group)()


def start_sum(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Callable[[], None]:
    """As `sum_gradients` over one group, but only begin: gradients must not change until what it returns was called,
    which waits and writes the sums."""
    if dist.get_world_size(group) == 1:
        return lambda: None
    buckets = [_Bucket(members) for members in _split([p for p in parameters if p.requires_grad])]
    works = []
    for bucket in buckets:
        bucket.move(_device(group))
        works.append(dist.all_reduce(bucket.flat, group=group, async_op=True))

    def finish() -> None:
        for bucket, work in zip(buckets, works, strict=True):
            assert work is not None
            work.wait()
            bucket.unpack()

    return finish


class _Bucket:
    """One message: the gradients of some parameters, then one flag each, which counts the ranks that have it."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        own = [local_part(p) for p in parameters]
        self.sizes = [part.numel() for part in own]
        gradients = [local_gradient(p) for p in parameters]
        present = torch.tensor([g is not None for g in gradients]).to(own[0])
        pieces = [(torch.zeros_like(p) if g is None else g) for p, g in zip(own, gradients, strict=True)]
        self.flat = torch.cat([*(piece.reshape(-1) for piece in pieces), present])

    def move(self, device: torch.device | None) -> None:
        """Bring the message to where its group can send it: gradients offloaded to the CPU do not lie there."""
        self.flat = self.flat.to(device)

    def unpack(self) -> None:
        *pieces, present = self.flat.split([*self.sizes, len(self.sizes)])
        for parameter, piece, ranks in zip(self.parameters, pieces, present.tolist(), strict=True):
            if ranks:
                set_local_gradient(parameter, piece)


def _device(group: dist.ProcessGroup) -> torch.device | None:
    """Where the tensors of a group must lie; None: anywhere that the group has been used with so far."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None


def _split(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Runs of parameters of one dtype and device, each of about BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        own = local_part(parameter)
        key, size = (own.dtype, own.device), own.numel() * own.element_size()
        bucket, filled = filling.get(key, ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[key] = (bucket, filled + size)
    return buckets
