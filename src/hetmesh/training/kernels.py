"""Which of torch's kernels a process uses, for training and for what is measured on its behalf."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hetmesh.boundary import World
    from hetmesh.recipe.recipe import Recipe


def choose_kernels(recipe: Recipe, world: World) -> None:
    """Those of training: deterministic ones where the recipe says so, and no cuDNN attention."""
    if recipe.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
        torch.use_deterministic_algorithms(True)
    choose_attention(world.device)


def choose_attention(device: torch.device) -> None:
    """Keep cuDNN's attention out of this process, where `device` is a CUDA device.

    It makes a plan for every shape that it has not seen, which holds the host up for 3 ms in each forward and backward
    (H100, torch 2.11); ragged batches bring new shapes in every step.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
