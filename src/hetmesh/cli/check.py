"""`hetmesh check RECIPE`: everything that can be known to be wrong before a worker starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hetmesh.recipe.recipe import Recipe, load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits.toml")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Check the recipe and print what it describes."""
    for line in checked(load_recipe(args.recipe, overrides)):
        print(line)
    print("ok")
    return 0


def checked(recipe: Recipe) -> list[str]:
    """The summary of `recipe`, after every check that one process can make.

    Raises:
        RecipeError: the first thing that is wrong.
    """
    from hetmesh.training.check import check_recipe
    from hetmesh.training.held_out import held_out_source
    from hetmesh.training.job import describe

    source, adapters, _ = describe(recipe)
    held_out_source(recipe)
    return check_recipe(recipe, adapters, source.placeholders)
