"""What one rank holds of a parameter and of its gradient: its local part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_gradient(parameter)
    assert gradient is not None
    gradient.copy_(value.view_as(gradient))
