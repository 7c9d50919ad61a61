"""How far a profile is from shapes that it was not fitted to: layers, and collectives with a process for each rank.

`hetmesh profile` of two recipes, with tensor parallelism and with context parallelism. `mean` and `worst` are relative
errors over all layers, parts and held-out microbatches of both recipes, the worst of them; `collectives_mean` and
`collectives_worst` the same of what the collectives inside layers take, which a busy machine stretches most.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hetmesh.cost import Profile

JUDGES = ("src/hetmesh/training/profile.py", "src/hetmesh/training/collective_profile.py", "src/hetmesh/cost/fitted.py")
"""What an output of it judges (`kept.py`)."""

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = ("digits_colocated", "digits_long")
TARGETS = {"mean": 0.10, "worst": 0.25}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--seconds", type=float, default=45.0, help="of measuring, each recipe (default %(default)s)")
    parser.add_argument("--keys", nargs="*", default=[], help="recipe keys, e.g. training.local_batch_size=8")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = str(Path(folder, f"{name}.json"))
            command = [sys.executable, "-m", "hetmesh", "profile", str(RECIPES / f"{name}.toml"), "--output", path]
            keys = [f"--{key}" for key in args.keys]
            subprocess.run([*command, "--seconds", str(args.seconds), *keys], check=True, capture_output=True)
            profile = Profile.load(path)
            found[name] = {"layers": vars(profile.held_out), "collectives": vars(profile.collectives_held_out)}
    out: dict[str, Any] = {}
    for prefix, what in (("", "layers"), ("collectives_", "collectives")):
        out[f"{prefix}mean"] = max(errors[what]["mean"] for errors in found.values())
        out[f"{prefix}worst"] = max(errors[what]["largest"] for errors in found.values())
    return out | {"recipes": found, "seconds_each": args.seconds}


def table(result: dict[str, Any]) -> str:
    """The keys for people."""
    lines = [f"{'recipe':18}{'of':14}{'mean':>8}{'worst':>8}{'measurements':>14}"]
    for name, each in result["recipes"].items():
        for what, errors in each.items():
            lines.append(f"{name:18}{what:14}{errors['mean']:8.1%}{errors['largest']:8.1%}{errors['count']:14,}")
    return "\n".join(lines)
