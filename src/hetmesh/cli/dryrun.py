"""`hetmesh dryrun RECIPE`: a rank's real training step on a device that computes nothing, at full size: no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hetmesh.errors import UsageError
from hetmesh.recipe.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, which rank of it, and how to show the step."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/siglip_qwen3_8b.toml")
    parser.add_argument("--rank", default="0", metavar="R", help="a rank, or `all`: one of each group of equal ranks")
    parser.add_argument("--machine", metavar="NAME", help="whose memory counts; default: [metrics] machine, else h100")
    parser.add_argument("--microbatches", type=int, metavar="N", help="of the step; default: as the recipe says")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run a step of the recipe in this one process."""
    recipe = load_recipe(args.recipe, overrides)
    if args.rank != "all" and not args.rank.isdecimal():
        raise UsageError(f"--rank {args.rank}: give a number, or all")
    from hetmesh.dryrun.dry_run import dry_runs
    from hetmesh.files import to_json
    from hetmesh.report.dry_run_text import dry_run_json, dry_run_lines

    rank = None if args.rank == "all" else int(args.rank)
    runs = dry_runs(recipe, rank, machine=args.machine, microbatches=args.microbatches)
    print(to_json(dry_run_json(runs), indent=2) if args.json else "\n".join(dry_run_lines(runs)))
    return 0
