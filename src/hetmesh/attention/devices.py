"""Which device has which kernel."""

from __future__ import annotations

import torch

from hetmesh.attention.flex import FLEX, flex_backward, flex_forward
from hetmesh.attention.kernels import Kernel, cpu_backward, cpu_forward


def kernel_for(device: torch.device) -> Kernel:
    """The kernel of a device: flex_attention where `FLEX` names it, as it does CUDA; elsewhere the CPU's."""
    if device.type in FLEX:
        return Kernel(flex_forward, flex_backward)
    return Kernel(cpu_forward, cpu_backward)
