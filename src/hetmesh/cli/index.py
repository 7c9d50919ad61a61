"""`hetmesh index RECIPE`: look through a recipe's data once, and keep what is found beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hetmesh.cli.check import add_arguments
from hetmesh.recipe.recipe import load_recipe

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Make the index of every data source that a recipe names, and print what is in it."""
    from hetmesh.data.index import index_data

    for line in index_data(load_recipe(args.recipe, overrides).data):
        print(line, flush=True)
    return 0
