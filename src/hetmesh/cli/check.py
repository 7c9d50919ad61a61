"""`hetmesh check RECIPE`: everything that can be known to be wrong before a worker starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetmesh._processes import no_garbage_collection
from hetmesh.recipe.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from hetmesh.resolve.resolved import ResolvedRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, and what else to print or compare."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits.toml")
    parser.add_argument("--parameters", action="store_true", help="also print which module has which parameters")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also load the weights, and compare logits and the first samples with transformers' own of the directory",
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Check the recipe and print what it describes; what to think of it comes last."""
    with no_garbage_collection():
        recipe = load_recipe(args.recipe, overrides)
        resolved, lines = checked(recipe)
        if recipe.elastic:
            from hetmesh.resolve.elastic import check_layouts, run_layouts

            lines.insert(0, check_layouts(run_layouts(Path(args.recipe), recipe, overrides)))
    from hetmesh.recipe.rewrite import recipe_toml
    from hetmesh.resolve.summary import parameters

    first_note = next((i for i, line in enumerate(lines) if line.startswith("note: ")), len(lines))
    described = lines[:first_note]
    if recipe.model.hf_path is not None:
        described.append(f"[model] hf_path = '{recipe.model.hf_path}' stands for:")
        described += (f"  {line}" for line in recipe_toml(recipe, ("modules", "boundaries", "data")).splitlines())
    if args.parameters:
        described += parameters(resolved)
    print(*described, *lines[first_note:], sep="\n", flush=True)
    if args.weights:
        from hetmesh.verify.self_check_process import compare

        print(*compare(resolved), sep="\n", flush=True)
    print("ok")
    return 0


def checked(recipe: Recipe, files: bool = True) -> tuple[ResolvedRecipe, list[str]]:
    """The recipe resolved, and its summary, notes last, after every check that one process can make. `files`: whether
    to look for the files that samples name. Raises RecipeError: everything that is wrong, a line each."""
    from hetmesh.data.source import abilities_of
    from hetmesh.errors import Refusals
    from hetmesh.records.dump_folder import resumable
    from hetmesh.resolve.refusals import check_run, needs_of_device
    from hetmesh.resolve.resolved import check_first_batch, resolve
    from hetmesh.resolve.samples import check_media_files, held_out_source, in_order_of_training
    from hetmesh.resolve.schedules import idle_in_collectives
    from hetmesh.resolve.summary import summary

    refusals, resolved, held_out = Refusals(), None, None
    notes: list[str] = []
    with refusals.collect():
        resolved = resolve(recipe)
        notes += check_first_batch(resolved)
    with refusals.collect():
        check_run(recipe)
    if resolved is not None:  # without a source there are no splits either
        with refusals.collect():
            held_out = held_out_source(recipe)
    if resolved is not None and recipe.checkpoint.initial_load_path and resumable(recipe) is None and not refusals.said:
        from hetmesh.checkpoint.initial_load import check_initial_weights

        with refusals.collect():
            notes += check_initial_weights(resolved)
    if resolved is not None and files:
        with refusals.collect():
            notes += check_media_files(recipe, resolved.source, in_order_of_training(resolved))
    if held_out is not None and files:
        with refusals.collect():
            count = recipe.validation.samples or len(held_out)
            notes += check_media_files(recipe, held_out, range(count), "validation ")
    refusals.finish()
    assert resolved is not None
    late = [phase.start_step for phase in recipe.data.phases if phase.start_step >= recipe.training.steps]
    notes += [f"data.phases: the phase from step {start} on never begins, after training.steps" for start in late]
    notes = [*resolved.notes, *notes, *needs_of_device(recipe), *idle_in_collectives(recipe, resolved.graph)]
    notes += abilities_of(resolved.source).notes()
    return resolved, [*summary(resolved), *(f"note: {note}" for note in notes)]
