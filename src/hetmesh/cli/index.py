"""`hetmesh index RECIPE`: look through a recipe's data once, and keep what is found beside it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from hetmesh.cli.check import add_arguments
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.recipe.sections import Data

__all__ = ["add_arguments", "run"]

INDEXED = ("conversations",)
"""Sources that keep an index."""

MAX_NAMED_SAMPLES = 10
"""Unreadable samples that are named."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Make the index of every data source that a recipe names, and print what is in it."""
    for line in index_data(load_recipe(args.recipe, overrides).data):
        print(line, flush=True)
    return 0


def index_data(keys: Data) -> Iterator[str]:
    """Make the indices of the sources of `[data]` and of their validation splits; yields a line about each.
    Raises RecipeError: a source cannot be made, or has nothing to index."""
    from hetmesh.data.conversations import ConversationsSource
    from hetmesh.data.metadata_index import build_index, load_index
    from hetmesh.data.recipe_sources import make_source

    tables = [(table, split) for table in keys.mixture or (keys,) for split in ("train", "validation")]
    for table, split in tables:
        options = {**table.options, "index": False} | ({} if split == "train" else {"split": split})
        if table.source not in INDEXED:
            raise RecipeError(f"[data] source = {table.source!r} keeps no index; those that do: {sorted(INDEXED)}")
        try:
            source = make_source(table.source, **options)
        except RecipeError:
            if split == "validation":  # there may be none
                continue
            raise
        assert isinstance(source, ConversationsSource)
        path = build_index(source)
        index = load_index(path, source.index_inputs)
        assert index is not None
        metas = index[0]
        counts = ", ".join(f"{int(metas.counts(kind).sum())} {kind}" for kind in metas.kinds)
        yield f"{path}: {len(metas)} samples, {int(metas.tokens.sum())} tokens" + (f", {counts}" if counts else "")
        for reason in list(metas.unreadable.values())[:MAX_NAMED_SAMPLES]:
            yield f"  cannot be read: {reason}"
        if len(metas.unreadable) > MAX_NAMED_SAMPLES:
            yield f"  and {len(metas.unreadable) - MAX_NAMED_SAMPLES} more"
