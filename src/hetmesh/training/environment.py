"""What a run sets up in its process: where samples are loaded, the World, and which of torch's kernels are used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from hetmesh.boundary import World, init
from hetmesh.data.loader import TRAIN, VALIDATION
from hetmesh.data.payload_workers import InWorkers
from hetmesh.data.payloads import Payloads
from hetmesh.data.recipe_sources import split_sources
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe

SAMPLE_TIMEOUT_SHARE = 0.8
"""Share of the time that ranks wait for each other after which a sample counts as hanging: the rank that waits for the
sample shall report it before the others report that they wait for the rank."""


def open_payloads(recipe: Recipe) -> Payloads:
    """Where the samples of `recipe` are loaded; worker processes start here, so call it before anything has a thread.
    Raises RecipeError: the data source cannot be made."""
    keys = recipe.data
    sources = split_sources(keys)
    if not keys.num_workers:
        return Payloads(sources)
    sources[TRAIN]  # made now, forked workers share them
    with contextlib.suppress(RecipeError):  # there may be none
        sources[VALIDATION]
    timeout = SAMPLE_TIMEOUT_SHARE * recipe.comm.train_timeout_seconds
    return InWorkers(sources, keys.num_workers, keys.prefetch_factor, timeout)


@contextlib.contextmanager
def world_for(recipe: Recipe) -> Iterator[World]:
    """The World of this process, which is left open, or a new one, which is closed after the body. Raises RecipeError:
    its number of ranks is not that of the recipe."""
    timeout = recipe.comm.init_timeout_seconds
    existing = World.current() if dist.is_initialized() else None
    world = existing or init(timeout=timeout, init_timeout=timeout)
    try:
        if world.size != recipe.world_size:
            how = f"torchrun --nproc-per-node {recipe.world_size}, or hetmesh.launch(function, {recipe.world_size})"
            raise RecipeError(
                f"the recipe needs {recipe.world_size} ranks, this job has {world.size}; start it by {how}"
            )
        yield world
    finally:
        if existing is None:
            world.close()


def choose_kernels(deterministic: bool, device: torch.device) -> None:
    """The kernels of training: `deterministic` ones or any, and no cuDNN attention."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
        torch.use_deterministic_algorithms(True)
    choose_attention(device)


def choose_attention(device: torch.device) -> None:
    """Disable cuDNN's attention in this process, where `device` is a CUDA device.

    It makes a plan for every shape that it has not seen, which holds the host up for 3 ms in each forward and backward
    (H100, torch 2.11); ragged batches bring new shapes in every step.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
