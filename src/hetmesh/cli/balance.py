"""`hetmesh balance RECIPE`: how uneven a recipe's batches are, what every balancer makes of them, what a step gains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hetmesh.recipe.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, where lengths and costs come from, and how to show the result."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits_balanced.toml")
    parser.add_argument(
        "--lengths",
        metavar="FILE.jsonl",
        help='samples of any data in place of the recipe\'s, one per line: {"vision": 1024, "llm": 700}: tokens per '
        "module, those of the LLM with the rows that it gets",
    )
    parser.add_argument("--batches", metavar="N", type=int, default=4, help="global batches to draw (default 4)")
    parser.add_argument("--machine", metavar="NAME", help="a machine's name or TOML file; default: [metrics] machine")
    parser.add_argument("--profile", metavar="FILE", help="what `hetmesh profile` wrote; default: [profiling] profile")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Balance the batches in this one process, without weights."""
    recipe = load_recipe(args.recipe, overrides)
    from hetmesh.report.balance_text import balance_text
    from hetmesh.report.balance_view import balance_view
    from hetmesh.resolve.resolved import resolve

    given = {"machine": args.machine, "profile": args.profile}
    view = balance_view(resolve(recipe), lengths=args.lengths, batches=args.batches, **given)
    print(balance_text(view))
    return 0
