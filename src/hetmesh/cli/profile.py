"""`hetmesh profile RECIPE`: measure what the layers of a recipe cost on this machine, for the planner and simulator."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetmesh._processes import no_blas_threads
from hetmesh.cli.launchers import find_place
from hetmesh.errors import HetmeshError
from hetmesh.recipe.recipe import Recipe, load_recipe

if TYPE_CHECKING:  # numpy's threads would keep workers from being forked
    from hetmesh.cost import HeldOut, Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, where the profile goes, and how long to measure."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits.toml")
    parser.add_argument("--output", metavar="FILE", help="default: profile.json in the recipe's dump_folder")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long to measure (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where this machine has GPUs")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Measure collectives, in a process for each rank of a group, then layers in this one, on a CPU with one thread."""
    with no_blas_threads():
        # An older profile may be of other modules.
        recipe = load_recipe(args.recipe, (*overrides, "--profiling.profile="))
        import torch

    from hetmesh.errors import LaunchError
    from hetmesh.files import writing
    from hetmesh.resolve.resolved import resolve
    from hetmesh.training.profile import profile_recipe

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError("--device cuda: this machine has no GPU that torch can use; valid is cpu")
    torch.set_num_threads(1)  # workers are forked from this process
    resolved = resolve(recipe)
    sent, said = _collectives(recipe, device)
    if (place := find_place(os.environ)) is not None and place.rank:
        return 0  # the first of a launcher's processes goes on alone
    profile = profile_recipe(resolved, seconds=args.seconds, device=device)
    profile = replace(profile, collectives=sent.collectives, collectives_held_out=sent.collectives_held_out)
    path = Path(args.output or Path(recipe.job.dump_folder) / "profile.json")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    threads = ", one thread" if device == "cpu" else ""
    print(f"{len(profile.layers)} kinds of layers in {profile.dtype} on {profile.device}{threads}")
    print(f"held-out shapes: {_errors(profile.held_out)}")
    print(f"collectives of tensor and context parallelism: {said}")
    if profile.collectives:
        print(f"held-out shapes of collectives: {_errors(profile.collectives_held_out)}")
    print(f"written to {path}")
    return 0


def _errors(held: HeldOut) -> str:
    return f"mean error {held.mean:.1%}, largest {held.largest:.1%} over {held.count} measurements"


def _collectives(recipe: Recipe, device: str) -> tuple[Profile, str]:
    """What processes for each rank of a group measured, and how, or why not."""
    import torch

    from hetmesh.cli.launch import launch
    from hetmesh.cost import Profile
    from hetmesh.training.collective_profile import group_recipe, measure_collectives

    if (group := group_recipe(recipe)) is None:
        return Profile(), "none in this recipe"
    gpus, reason = torch.cuda.device_count(), ""
    there = gpus if device == "cuda" else 0 if gpus else len(os.sched_getaffinity(0))
    if find_place(os.environ) is None and group.world_size > there:
        reason = f"{group.world_size} processes need as many {'GPUs' if gpus else 'cores'}"
    else:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "collectives.json"
                launch(measure_collectives, group.world_size, group, str(path))
                if path.exists():
                    return Profile.load(path), f"measured with {group.world_size} processes"
        except HetmeshError as error:
            reason = str(error).splitlines()[-1]
    return Profile(), f"not measured, predictions take the machine's links: {reason}"
