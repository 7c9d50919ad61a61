"""Sums of gradients over the axes that `gradient_axes` gives, once per step. Sums, never means: the loss is a sum over
targets, scaled once by 1 / (global targets)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 64 * 2**20
"""Gradients are packed into messages of about this size: large enough that latency does not count."""

IN_FLIGHT = 4
"""Messages of one sum that are under way at a time, each a copy of its gradients."""


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, detached: all of a plain tensor, the local shard of a DTensor.
    Shares its memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # then it is the local tensor itself; with gradients every call goes through dispatch
            return tensor.to_local().detach()
    return tensor.detach()


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The local part of a parameter's gradient, None if it has none. Shares its memory.

    A gradient that was left in other placements than its parameter (Partial, by modules that use DTensors on their
    own) is first brought into those of the parameter: a collective over the parameter's mesh.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_part(gradient)


def set_local_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    """Write `value` (any shape with as many elements) into the local part of the gradient; makes it if it is None."""
    make_missing([parameter])
    gradient = local_gradient(parameter)
    assert gradient is not None
    gradient.copy_(value.view_as(gradient))


def sum_gradients(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Replace every gradient by its sum over `groups`, one group after another (the axes of a mesh).

    Collective: every rank of a group calls it with corresponding parameters; of DTensors the local parts are summed.
    The messages depend on the parameters only, and on which of them have a gradient on any rank: a missing gradient
    counts as zero, and stays None if it is missing on every rank, as in a single process. Frozen parameters are left
    out. Order and packing are fixed, so the result is deterministic.
    """
    trained = [p for p in parameters if p.requires_grad]
    anywhere = have_gradients([p.grad is not None for p in trained], [(group, range(len(trained))) for group in groups])
    for group in groups:
        start_sum([p for p, has in zip(trained, anywhere, strict=True) if has], group)()


def have_gradients(here: Sequence[bool], sums: Sequence[tuple[dist.ProcessGroup, Sequence[int]]]) -> list[bool]:
    """Which gradients exist on any of the ranks that they are summed over. Collective; the host waits for the answer.
    `sums`: groups, one after another, and the places in `here` of what is summed over each."""
    sums = [(group, places) for group, places in sums if places and dist.get_world_size(group) > 1]
    if not sums:
        return list(here)
    flags = torch.tensor(here, dtype=torch.int32, device=group_device(sums[0][0]))
    for group, places in sums:
        where = torch.tensor(list(places), device=flags.device)
        some = flags[where]
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)
        flags[where] = some
    return [bool(flag) for flag in flags.tolist()]


def make_missing(parameters: Sequence[nn.Parameter]) -> None:
    """Give a gradient of zeros to each of `parameters` that has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def start_sum(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to replace the gradients of `parameters` by their sums over a group; those that are missing count as zero,
    and are made. Gradients must not change until what it returns was called, which waits and writes the sums. Few
    messages are packed at a time: they never take as much memory as the gradients once more."""
    if dist.get_world_size(group) == 1:
        return lambda: None
    make_missing(parameters)
    waiting = deque(_split(parameters))
    under_way: deque[tuple[_Bucket, dist.Work]] = deque()

    def post() -> None:
        bucket = _Bucket(waiting.popleft(), group_device(group))
        work = dist.all_reduce(bucket.flat, group=group, async_op=True)
        assert work is not None
        under_way.append((bucket, work))

    def finish() -> None:
        while under_way:
            bucket, work = under_way.popleft()
            work.wait()
            bucket.unpack()
            del bucket, work  # before the next is packed
            if waiting:
                post()

    while waiting and len(under_way) < IN_FLIGHT:
        post()
    return finish


class _Bucket:
    """One message: the gradients of some parameters. `device`: from which its group can send it; gradients that are
    offloaded to the CPU lie elsewhere."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device | None) -> None:
        self.parameters = parameters
        gradients = [g for g in map(local_gradient, parameters) if g is not None]
        self.sizes = [gradient.numel() for gradient in gradients]
        self.flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(device)

    def unpack(self) -> None:
        for parameter, piece in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            set_local_gradient(parameter, piece)


def group_device(group: dist.ProcessGroup) -> torch.device | None:
    """Where the tensors of a group must lie; None: anywhere that the group has been used with so far."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None


def _split(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Runs of parameters of one dtype and device, each of about BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        local = local_part(parameter)
        key, size = (local.dtype, local.device), local.numel() * local.element_size()
        bucket, filled = filling.get(key, ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[key] = (bucket, filled + size)
    return buckets
