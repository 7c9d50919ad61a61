"""`hetmesh profile RECIPE`: measure what the layers of a recipe cost on this machine, for the planner and simulator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hetmesh.recipe.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, where the profile goes, and how long to measure."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits.toml")
    parser.add_argument("--output", metavar="FILE", help="default: profile.json in the recipe's dump_folder")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long to measure (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where this machine has GPUs")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Measure in this one process, on one device; a CPU's with one thread."""
    recipe = load_recipe(args.recipe, overrides)
    import torch

    from hetmesh.errors import LaunchError
    from hetmesh.files import to_json, writing
    from hetmesh.resolve.resolved import resolve
    from hetmesh.training.profile import profile_recipe

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError("--device cuda: this machine has no GPU that torch can use; valid is cpu")
    profile = profile_recipe(resolve(recipe), seconds=args.seconds, device=device)
    path = Path(args.output or Path(recipe.job.dump_folder) / "profile.json")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    if args.json:
        print(to_json(profile.as_json(), indent=2))
        return 0
    held = profile.held_out
    threads = ", one thread" if device == "cpu" else ""
    print(f"{len(profile.layers)} kinds of layers in {profile.dtype} on {profile.device}{threads}")
    print(f"held-out shapes: mean error {held.mean:.1%}, largest {held.largest:.1%} over {held.count} measurements")
    print(f"written to {path}")
    return 0
