"""`hetmesh explain RECIPE`: what a recipe means: which rank holds what, what it costs, what moves between modules."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from hetmesh.recipe.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, and how to show it."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits.toml")
    parser.add_argument("--machine", metavar="NAME", help="whose memory it is to fit; default: [metrics] machine")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.add_argument("--png", metavar="FILE", help="also draw it (needs matplotlib)")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Explain the recipe in this one process, without weights."""
    recipe = load_recipe(args.recipe, overrides)
    from hetmesh.files import to_json
    from hetmesh.report import as_text, explain, save_picture
    from hetmesh.resolve.resolved import resolve

    view = explain(resolve(recipe), args.machine)
    if args.png:
        save_picture(view, args.png)
    width = shutil.get_terminal_size((120, 24)).columns
    print(to_json(view.as_json(), indent=2) if args.json else as_text(view, width))
    return 0
