"""The World that a run of a recipe needs: the one that is there, or one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hetmesh.boundary import World, init
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe


@contextmanager
def world_of(recipe: Recipe) -> Iterator[World]:
    """The World of this process, which stays, or one that is made here and closed behind the body.

    Raises:
        RecipeError: it has another number of ranks than the recipe.
    """
    patience = recipe.comm.init_timeout_seconds
    found = World.current() if dist.is_initialized() else None
    world = found or init(timeout=patience, init_timeout=patience)
    try:
        if world.size != recipe.world_size:
            how = f"torchrun --nproc-per-node {recipe.world_size}, or hetmesh.launch(function, {recipe.world_size})"
            raise RecipeError(
                f"the recipe needs {recipe.world_size} ranks, this job has {world.size}; start it by {how}"
            )
        yield world
    finally:
        if found is None:
            world.close()
