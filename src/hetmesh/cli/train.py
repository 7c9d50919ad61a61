"""`hetmesh train RECIPE`: train on this machine with workers of its own, or as a worker that torchrun started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hetmesh.cli.check import add_arguments, checked
from hetmesh.errors import HetmeshError, RecipeError
from hetmesh.recipe.recipe import Recipe, load_recipe

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; returns the exit status."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join(args.recipe, overrides)
    recipe = load_recipe(args.recipe, overrides)
    import torch

    from hetmesh.cli.launch import launch, threads_per_worker

    torch.set_num_threads(1)  # workers are forked from this process: it must not have started a thread pool by then
    _announce(recipe, checked(recipe))
    if recipe.world_size > 1:
        return launch(recipe)
    torch.set_num_threads(threads_per_worker(1))
    from hetmesh.training.trainer import train

    train(recipe)
    return 0


def _join(path: str, overrides: Sequence[str]) -> int:
    """Be one of torchrun's workers. What is wrong with the recipe is the same on every rank, so rank 0 says it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        recipe = load_recipe(path, overrides)
        if world_size != recipe.world_size:
            raise RecipeError(
                f"{path} describes {recipe.world_size} ranks, but torchrun started WORLD_SIZE = {world_size}; start "
                f"{recipe.world_size} (on one machine: --nproc-per-node {recipe.world_size}), or change the ranks "
                "under [parallelism]"
            )
        summary = checked(recipe)
    except RecipeError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        _announce(recipe, summary)
    from hetmesh.training.trainer import train

    try:
        record(train)(recipe)  # torchrun's report then quotes the error
    except HetmeshError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return 1
    return 0


def _announce(recipe: Recipe, summary: Sequence[str]) -> None:
    if recipe.job.print_config:
        print(recipe.model_dump_json(indent=2, by_alias=True))
    print("\n".join(summary), flush=True)
