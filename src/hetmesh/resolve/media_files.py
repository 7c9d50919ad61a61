"""Whether the files that samples name are there, before a run meets the first that is not."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.errors import RecipeError, SampleError
from hetmesh.formatting import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hetmesh.recipe.recipe import Recipe

LOOKED_AT = 4096
"""Samples of a split that are looked at, at most: each record is read, and each file that it names looked up."""


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
    look = getattr(source, "check_files", None)
    kinds = {kind for kind in recipe.wiring.media.values() if kind is not None}
    if look is None:
        return []
    distinct = dict.fromkeys(islice(order, LOOKED_AT + 1))
    looked, bad, unread = list(distinct)[:LOOKED_AT], list[str](), Counter[str]()
    for index in looked:
        try:
            unread.update(look(index, kinds) or ())
        except SampleError as error:
            bad.append(str(error))
    of = f"{counted(len(looked), f'{split}sample')}"
    notes = [f"files were looked for of the first {of} that the run reads"] if len(distinct) > len(looked) else []
    if unread:
        shown = ", ".join(f"{count} .{name}" for name, count in unread.most_common(8))
        notes.append(f"tar members that no record names are not read: {shown} (of {of})")
    if not bad:
        return notes
    told = f"{len(bad)} of {of} cannot be read: {'; '.join(bad[:3])}{'; and more' if len(bad) > 3 else ''}"
    if recipe.data.on_bad_sample != "skip":
        raise RecipeError(f'[data] {told}. Mend or remove them, or leave them out: data.on_bad_sample = "skip"')
    return [*notes, f"{told} (data.on_bad_sample = 'skip' leaves them out)"]


def in_order_of_training(recipe: Recipe, source: Source) -> Iterator[int]:
    """Indices of the samples of all steps of a run that begins anew."""
    loader = Loader(source, recipe.batch.global_batch_size, seed=recipe.debug.seed)
    return (index for step in range(recipe.training.steps) for index in loader.indices(step))
