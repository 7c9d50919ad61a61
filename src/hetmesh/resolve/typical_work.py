"""What a typical microbatch gives the modules of a recipe to do, from the metadata of its source."""

from __future__ import annotations

from collections.abc import Mapping

from hetmesh.cost import Work
from hetmesh.cost.work import samples_work
from hetmesh.data.expand import Expander
from hetmesh.data.loader import Loader
from hetmesh.data.source import Source
from hetmesh.graph import ModuleGraph, ModuleSpec
from hetmesh.layout import MeshSpec
from hetmesh.models import Adapter, module_rows, placeholder_rows
from hetmesh.recipe.recipe import Recipe

MAX_SAMPLES = 256
"""Samples, evenly from all of the source, whose mean is typical."""


def typical_work(recipe: Recipe, adapters: Mapping[str, Adapter], source: Source) -> dict[str, Work]:
    """Per module what a microbatch of mean samples gives one of its lanes, at least one row. Samples that cannot be
    read, or do not suit the modules, are left out; it is empty where all are."""
    plain, wiring = MeshSpec.make([0], dp_replicate=1), recipe.wiring
    modules = [ModuleSpec(name, plain, adapters[name].layers(), wiring.media[name]) for name in recipe.modules]
    graph = ModuleGraph(tuple(modules), wiring.topology.boundaries)
    rows, length = placeholder_rows(graph, adapters), recipe.training.seq_len
    expander = Expander(rows, seq_len=length, module_rows=module_rows(graph, adapters))
    count = min(len(source), MAX_SAMPLES)
    chosen = [i * len(source) // count for i in range(count)]
    drawn = Loader(source, count, expander, skip=True).drawn(chosen)
    metas = drawn.metas.take([i for i in range(count) if i not in drawn.unreadable])
    if not len(metas):
        return {}
    found = {}
    for name in graph.order:
        samples = recipe.batch.microbatch_size * recipe.lanes / wiring.lanes(name)
        means = samples_work(graph, name, metas).mean(0).tolist()
        found[name] = Work(*(max(round(mean * samples), 1) for mean in means))
    return found
