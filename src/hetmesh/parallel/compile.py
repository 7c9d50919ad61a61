"""torch.compile of each block, where a compiler is present."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterable

import torch
from torch import nn

WITHOUT_COMPILER = ("eager", "aot_eager")
"""Backends that trace and compile nothing: they show what torch.compile makes of a module."""


def apply_compile(blocks: Iterable[nn.Module], backend: str, device_type: str) -> None:
    """Compile each block, in place, after activation checkpointing and before FSDP. Names stay as they are.

    Where no compiler is present it warns and leaves the blocks as they are: compiling changes speed only.
    Sizes may change from one microbatch to the next. The collectives of tensor and sequence parallelism interrupt a
    compiled block: they are not traced.
    """
    if (reason := missing_compiler(backend, device_type)) is not None:
        warnings.warn(f"[compile] enable: {reason}, so modules run uncompiled", stacklevel=2)
        return
    for block in blocks:
        # The forward, not the call: what hooks do around it (FSDP, random state) would interrupt the graph.
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def unknown_backend(backend: str) -> list[str]:
    """The names that torch.compile knows, if `backend` is none of them; else nothing."""
    if backend in ("inductor", *WITHOUT_COMPILER):
        return []
    valid = torch.compiler.list_backends(exclude_tags=())
    return [] if backend in valid else valid


def missing_compiler(backend: str, device_type: str) -> str | None:
    """What `backend` needs on this machine and does not find; None if nothing is missing."""
    if backend in WITHOUT_COMPILER:
        return None
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++", "cl")
    if device_type == "cpu" and not any(name and shutil.which(name) for name in compilers):
        return "no C++ compiler was found"
    return None
