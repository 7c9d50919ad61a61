"""`hetmesh train RECIPE`: train on this machine with workers of its own, or as one that a launcher started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hetmesh._processes import die_with_parent, no_blas_threads
from hetmesh.cli import FAILURE, USAGE_ERROR
from hetmesh.cli.check import checked
from hetmesh.cli.launchers import SLURM, TORCHRUN, Place, find_place
from hetmesh.errors import HetmeshError, LaunchError, RecipeError, SelfCheckError
from hetmesh.recipe.recipe import Recipe, load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, and whether to compare it with its directory first."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits.toml")
    parser.add_argument(
        "--no-self-check",
        action="store_true",
        help="do not compare the modules with transformers' own forward when a directory is used for the first time",
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train; returns the exit status."""
    place = find_place(os.environ)
    if place is not None:
        return _join(place, args, overrides)
    with no_blas_threads():
        recipe = load_recipe(args.recipe, overrides)
        import torch

    from hetmesh.cli.launch import launch_recipe, threads_per_worker

    torch.set_num_threads(1)  # workers are forked from this process: it must not have started a thread by then
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers start threads with their first batch of texts
    resolved, summary = checked(recipe)
    _announce(recipe, [*summary, *_self_checked(recipe, args)])
    if recipe.world_size > 1:
        return launch_recipe(recipe)
    torch.set_num_threads(threads_per_worker(1))
    from hetmesh.api import run_recipe

    run_recipe(recipe, resolved)
    return 0


def _join(place: Place, args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Be one of a launcher's workers. What is wrong with the recipe is the same on every rank, so rank 0 says it."""
    rank, path = place.rank, args.recipe
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent is the parent; killed itself, it would leave workers
        die_with_parent(os.getppid())
    try:
        recipe = load_recipe(path, overrides)
        if recipe.elastic:
            from hetmesh.cli.elastic_start import agreed_recipe

            _settle(place)
            agreed = agreed_recipe(Path(path), recipe, overrides, place.size)
            if agreed is None:  # rank 0 says why
                return USAGE_ERROR
            recipe = agreed
        elif place.size != recipe.world_size:
            raise RecipeError(_wrong_size(place, path, recipe.world_size))
        resolved, summary = checked(recipe, files=False)  # not by each of many ranks
        if rank == 0:
            summary += _self_checked(recipe, args)
    except (RecipeError, SelfCheckError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except LaunchError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return FAILURE
    if rank == 0:
        _announce(recipe, summary)
        if place.note:
            print(place.note, file=sys.stderr, flush=True)
    _settle(place)
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.errors import record

    from hetmesh.api import run_recipe

    try:
        # torchrun's report then quotes the error
        (record(run_recipe) if place.launcher == TORCHRUN else run_recipe)(recipe, resolved)
    except (DistNetworkError, DistStoreError) as error:
        first = str(error).strip().partition("\n")[0]
        message = LaunchError(
            f"{place.launcher} started this process as rank {rank} of {place.size}; meeting the others at "
            f"{place.address}:{place.port} (MASTER_ADDR, MASTER_PORT) failed: {first}"
        )
        print(f"error: rank {rank}: {message}", file=sys.stderr)
        return FAILURE
    except HetmeshError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return FAILURE
    return 0


def _self_checked(recipe: Recipe, args: argparse.Namespace) -> list[str]:
    """Compare the modules with transformers' own forward where the recipe's directory is used for the first time; what
    the summary says of it. Raises SelfCheckError: they differ, or could not be compared."""
    from hetmesh.verify.self_check_process import compare_in_process, needs_self_check

    if not needs_self_check(recipe):
        return []
    if args.no_self_check:
        return ["note: its weights were not compared with transformers' own forward (--no-self-check)"]
    print("comparing the modules with transformers' own forward, once for this directory", file=sys.stderr, flush=True)
    try:
        return compare_in_process(recipe)
    except SelfCheckError as error:
        raise SelfCheckError(
            f"{error}. (hetmesh check {args.recipe} --weights repeats it; --no-self-check trains all the same)"
        ) from error


def _wrong_size(place: Place, path: str, needed: int) -> str:
    names = {TORCHRUN: "WORLD_SIZE = ", SLURM: "SLURM_NTASKS = "}
    how = {TORCHRUN: f"on one machine: --nproc-per-node {needed}", SLURM: f"srun --ntasks {needed} hetmesh train ..."}
    return (
        f"{path} describes {needed} ranks, but {place.launcher} started {names.get(place.launcher, '')}{place.size}; "
        f"start {needed} ({how.get(place.launcher, f'{place.launcher} -n {needed} hetmesh train ...')}), or change the "
        f"ranks under [parallelism]: `hetmesh plan {path} --ranks {place.size} --write FILE.toml` finds a layout for "
        f"{place.size}, and a checkpoint of any layout goes on in it (by itself where [elastic] layouts names it)"
    )


def _settle(place: Place) -> None:
    """Torchrun's variables, and threads, where another launcher started this process."""
    if place.launcher == TORCHRUN:
        return
    import torch

    from hetmesh.cli.launch import threads_per_worker

    os.environ |= place.environment
    if place.local_size == place.size and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as workers of our own
    own = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if own.isdigit():
        os.environ.setdefault("OMP_NUM_THREADS", own)
    torch.set_num_threads(threads_per_worker(place.local_size))


def _announce(recipe: Recipe, summary: Sequence[str]) -> None:
    if recipe.job.print_config:
        print(recipe.model_dump_json(indent=2, by_alias=True))
    print("\n".join(summary), flush=True)
