"""Build a module with weights that depend on nothing but the seed and the module's name."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from hetmesh.models.adapter import Adapter


def build_module(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module on the CPU, with random weights drawn from `(seed, name)` in fp32 and cast to `dtype`.

    Every rank of any layout gets the same weights as one process would, without communication; fp64 runs start from
    the fp32 ones. The global RNG is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))  # 32 bits: the CPU generator ignores higher ones
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            module = adapter.build()
        finally:
            torch.set_default_dtype(default)
    return module.to(dtype)
