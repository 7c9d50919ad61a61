"""What the machine is: versions, GPUs, what reaches what, and whether something else uses them."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

from gpu_checks.found import Found, Place, Skip
from hetmesh.parallel.compile import missing_compiler

IN_USE = 1.5e9
"""Bytes of a GPU's memory that the driver and this process may have taken; above it somebody else uses the GPU."""


def run(place: Place) -> Found:
    """Versions, and on CUDA the devices."""
    if place.device == "fake":
        raise Skip("a fake accelerator has no hardware")
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "no_compiler": missing_compiler("inductor", "cuda" if place.on_gpu else "cpu"),
        "triton": version("triton") if importlib.util.find_spec("triton") else None,
    }
    if not place.on_gpu:
        return Found(figures, {}, {"GPUs": f"the list runs on {place.device}"})
    return Found({**figures, **_gpus(place.gpus)}, {"bytes_in_use_before": IN_USE}, _alone(place.gpus))


def _gpus(count: int) -> dict[str, Any]:
    names, memory, used = [], [], []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        names.append(torch.cuda.get_device_name(index))
        memory.append(total)
        used.append(total - free)
    return {
        "gpus": names,
        "memory_bytes": memory,
        "bytes_in_use_before": max(used),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "capability": [".".join(map(str, torch.cuda.get_device_capability(i))) for i in range(count)],
        "reach_each_other": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)
        ],
    }


def _alone(gpus: int) -> dict[str, str]:
    return {} if gpus > 1 else {"several GPUs": "there is one: ranks share it, and times of messages mean nothing"}
