"""Activations in the host's memory between a forward and its backward; weights stay where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetmesh.boundary.accelerator import Accelerator
from hetmesh.parallel import local_part

Kept = Tensor | tuple[torch.device, Tensor]


def activations_on_host(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> saved_tensors_hooks:
    """A context in which autograd keeps what it saves in the host's memory, until the backward needs it.

    `torch.autograd.graph.save_on_cpu` would move weights as well, one copy per microbatch; they stay where they are.

    Args:
        parameters: of the module that runs inside.
        accelerator: where it runs; if it is asynchronous nothing waits for a copy.
    """
    weights = {local_part(p).untyped_storage().data_ptr() for p in parameters}

    def pack(saved: Tensor) -> Kept:
        # What FSDP has gathered is a parameter for as long as the forward lasts, and comes back into the same memory.
        gathered = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
        if gathered or saved.untyped_storage().data_ptr() in weights:
            return saved
        if not accelerator.asynchronous:
            return saved.device, saved.cpu()
        return saved.device, accelerator.empty_pinned(saved).copy_(saved, non_blocking=True)

    def unpack(kept: Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, host = kept
        return host.to(device, non_blocking=accelerator.asynchronous)

    return saved_tensors_hooks(pack, unpack)
