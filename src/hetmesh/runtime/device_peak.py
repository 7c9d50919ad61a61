"""A device: its name, its peak FLOP/s, and the most memory that was in use on it."""

from __future__ import annotations

import resource
import sys
import timeit
from dataclasses import dataclass

import torch

from hetmesh.boundary import World
from hetmesh.cost import find_machine, load_machine
from hetmesh.recipe.recipe import Recipe

_SMALLEST, _LARGEST = 64, 1024  # of the square matrix product that stands for a CPU's peak
_MIN_PRODUCT_S = 0.01


@dataclass(frozen=True)
class PeakFlops:
    """The FLOP/s of one device that MFU refers to, None if unknown, and where the number comes from."""

    flops: float | None
    dtype: str
    origin: str

    def __str__(self) -> str:
        if self.flops is None:
            return f"no MFU: {self.origin}"
        return f"MFU refers to {self.flops / 1e9:,.0f} GFLOP/s in {self.dtype} per rank ({self.origin})"


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors have taken on a CUDA device, else the most that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


def device_name(device: torch.device) -> str:
    """The name of a CUDA device, else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_peak(recipe: Recipe, world: World, dtype: torch.dtype) -> PeakFlops:
    """The peak of `[metrics] machine`, else of the machine with the CUDA device's name, else measured on the CPU."""
    device, name, kind = world.device, recipe.metrics.machine, str(dtype).removeprefix("torch.")
    reported = device_name(device) if device.type == "cuda" else None
    machine = load_machine(name) if name else find_machine(reported) if reported else load_machine("cpu")
    if machine is None:
        return PeakFlops(None, kind, f"no machine description fits {reported!r}; give one as [metrics] machine")
    if (flops := machine.peak(kind)) is not None:
        return PeakFlops(flops, kind, f"machine {machine.name!r}")
    if device.type == "cuda":
        return PeakFlops(None, kind, f"machine {machine.name!r} has no peak for {kind}")
    return PeakFlops(measure_peak(dtype), kind, "measured by a matrix product on every rank at once")


def measure_peak(dtype: torch.dtype, times: int = 3) -> float:
    """FLOP/s of this process in a square matrix product: the best of `times`, large enough to take milliseconds."""
    size, seconds = _SMALLEST, 0.0
    while size < _LARGEST and seconds < _MIN_PRODUCT_S:  # a CPU without bfloat16 units is 50 times slower in it
        size *= 2
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        torch.mm(a[:32], b)  # starts threads and loads kernels
        seconds = min(timeit.repeat(lambda: torch.mm(a, b), number=1, repeat=times))  # noqa: B023 - called at once
    return 2 * size**3 / seconds
