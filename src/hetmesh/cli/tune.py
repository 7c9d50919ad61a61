"""`hetmesh tune RECIPE`: the layout that is fastest on the ranks at hand, by real steps of a few of them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetmesh._processes import no_blas_threads
from hetmesh.cli.launchers import find_place
from hetmesh.cli.plan import add_layout_arguments, fixed_keys
from hetmesh.errors import LaunchError, UsageError
from hetmesh.files import read_object, read_text, write_json, writing
from hetmesh.recipe.recipe import load_recipe

if TYPE_CHECKING:  # numpy's threads would keep workers from being forked
    from hetmesh.training.tune.tuner import Asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, what its layouts must keep to, and how long to measure."""
    add_layout_arguments(parser)
    parser.add_argument("--ranks", metavar="N", type=int, help="default: those of the recipe, or of the launcher")
    parser.add_argument("--budget", metavar="SECONDS", type=float, help="of turns; planning and fits come on top")
    parser.add_argument("--output", metavar="FOLDER", help="default: tune in the recipe's dump_folder")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start workers, or be one of a launcher's; where a layout ends one, start them again after it."""
    place = find_place(os.environ)
    with no_blas_threads():
        recipe = load_recipe(args.recipe, overrides)
        import torch
    for name, value in (("--ranks", args.ranks), ("--budget", args.budget)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} {value}: must be above 0")
    from hetmesh.cli.launch import launch
    from hetmesh.training.tune.tuner import STATE_FILE, Asked

    if place is None:
        torch.set_num_threads(1)  # workers are forked from this process
    folder = Path(args.output or Path(recipe.job.dump_folder) / "tune")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    ranks = args.ranks or (recipe.world_size if place is None else place.size)
    search = args.machine, args.profile, fixed_keys(args.fix), args.budget, folder
    asked = Asked(recipe, args.recipe, read_text(args.recipe), tuple(overrides), ranks, *search)
    before = None
    while True:  # a layout with which workers died twice has failed
        try:
            launch(_tune, asked.ranks, asked)
            return 0
        except LaunchError as error:
            found = read_object(folder / STATE_FILE)
            if place is not None or not found.get("running") or found == before:  # it would end so again
                raise
            before = found
            print(f"{found['running']}: a worker ended ({error}); starting again", flush=True)
        except (KeyboardInterrupt, SystemExit):  # no layout's fault
            if place is None and (found := read_object(folder / STATE_FILE)):
                write_json(folder / STATE_FILE, found | {"running": "", "begun": 0}, indent=1)
                print(f"stopped; the same command goes on after turn {len(found.get('findings', ()))}", flush=True)
            raise


def _tune(asked: Asked) -> None:
    """On every rank."""
    from hetmesh.report.tune_view import result_text, save_result, turn_line
    from hetmesh.training.tune.tuner import tune

    tuner = tune(asked, lambda tuner: print(turn_line(tuner), flush=True))
    if tuner is None:  # another rank
        return
    print(result_text(tuner, save_result(asked, tuner)), flush=True)
    if asked.recipe.code_folder is not None or asked.recipe.elastic.layouts:
        print(f"note: it names files beside {asked.path}: put it there before you train with it", flush=True)
    if tuner.best is None:
        raise UsageError("no layout ran" + (f" in --budget {asked.budget:g}" if tuner.untried else ""))
