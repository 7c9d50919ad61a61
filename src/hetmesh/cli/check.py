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
        RecipeError: everything that is wrong, a line each.
    """
    from hetmesh.errors import Refusals
    from hetmesh.training.describe import describe
    from hetmesh.training.held_out import held_out_source
    from hetmesh.training.refusals import check_run
    from hetmesh.training.summary import summary

    refusals, adapters = Refusals(), None
    with refusals.collect():
        _, adapters, _ = describe(recipe)
    with refusals.collect():
        check_run(recipe)
    if adapters is not None:  # without a source there are no splits either
        with refusals.collect():
            held_out_source(recipe)
    refusals.finish()
    assert adapters is not None
    return list(summary(recipe, adapters))
