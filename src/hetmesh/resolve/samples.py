"""The samples of a run before it begins: the held-out ones, and whether the files that samples name are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from hetmesh.data.loader import VALIDATION
from hetmesh.data.payloads import SplitSources
from hetmesh.data.recipe_sources import split_sources
from hetmesh.data.source import Source, abilities_of
from hetmesh.errors import RecipeError, SampleError
from hetmesh.formatting import counted
from hetmesh.graph.sample import kinds_of
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.resolved import ResolvedRecipe

MAX_SAMPLES_CHECKED = 4096
"""Samples of a split whose files are looked up: each record is read, none of its files opened."""


def held_out_source(recipe: Recipe, sources: SplitSources | None = None) -> Source | None:
    """The validation split of the recipe's data source; None if it has none and `[validation]` does not ask for one, or
    if it is not enabled. `sources`: the run's sources, if there are some already. Raises RecipeError: `[validation]`
    has a freq or a number of samples, and the source has no validation split, an empty one, or one of fewer samples."""
    if not recipe.validation.enable:
        return None
    keys = recipe.validation
    given = {name: getattr(keys, name) for name in ("freq", "samples", "free_running")}
    key = next((f"validation.{name} = {value}" for name, value in given.items() if value), "")
    asked = bool(keys.freq) or keys.samples is not None or keys.free_running > 0
    try:
        source = (sources or split_sources(recipe.data))[VALIDATION]
    except RecipeError as error:
        if not asked:
            return None
        raise RecipeError(
            f"{key}: the data source has no validation split ({error}); give it one, or leave [validation] out"
        ) from error
    if len(source) == 0:
        if not asked:
            return None
        raise RecipeError(f"{key}: the validation split of {recipe.data.source!r} is empty")
    if keys.free_running > len(source):
        raise RecipeError(
            f"validation.free_running = {keys.free_running}: the validation split has {len(source)} samples; valid are "
            f"0 to {len(source)}"
        )
    if keys.samples is not None and keys.samples > len(source):
        raise RecipeError(
            f"validation.samples = {keys.samples}: the validation split has {len(source)}; valid are 1 to "
            f"{len(source)}, or leave it out to take them all"
        )
    return source


def check_media_files(recipe: Recipe, source: Source, order: Iterable[int], split: str = "") -> list[str]:
    """Look for the files of the samples that a run reads; none is opened. Sources without `check_files` are not asked.

    Args:
        order: indices of samples, as the run reads them.
        split: what to call the samples.

    Returns:
        What is to be said of it: how many were looked at, where not all were; with `[data] on_bad_sample = "skip"`,
        what will be left out; which members of tar shards no record names.

    Raises:
        RecipeError: a file is not there, or a record cannot be read.
    """
    look = abilities_of(source).check_files
    kinds = {kind for media in recipe.wiring.media.values() if media is not None for kind in kinds_of(media)}
    if look is None:
        return []
    distinct = dict.fromkeys(islice(order, MAX_SAMPLES_CHECKED + 1))
    checked, bad, unread = list(distinct)[:MAX_SAMPLES_CHECKED], list[str](), Counter[str]()
    for index in checked:
        try:
            unread.update(look(index, kinds) or ())
        except SampleError as error:
            bad.append(str(error))
    of = counted(len(checked), f"{split}sample")
    notes = [f"files were looked for of the first {of} that the run reads"] if len(distinct) > len(checked) else []
    if unread:
        shown = ", ".join(f"{count} .{name}" for name, count in unread.most_common(8))
        notes.append(f"tar members that no record names are not read: {shown} (of {of})")
    if not bad:
        return notes
    problem = f"{len(bad)} of {of} cannot be read: {'; '.join(bad[:3])}{'; and more' if len(bad) > 3 else ''}"
    if recipe.data.on_bad_sample != "skip":
        raise RecipeError(f'[data] {problem}. Fix or remove them, or leave them out: data.on_bad_sample = "skip"')
    return [*notes, f"{problem} (data.on_bad_sample = 'skip' leaves them out)"]


def in_order_of_training(resolved: ResolvedRecipe) -> Iterator[int]:
    """Indices of the samples of all steps of a run that begins anew."""
    loader = resolved.loader()
    return (index for step in range(resolved.recipe.training.steps) for index in loader.indices(step))
