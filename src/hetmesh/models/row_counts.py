"""How many rows each module emits: adapters' row counts composed along the boundaries, into the sample metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from hetmesh.graph import ModuleGraph
from hetmesh.models.adapter import Adapter

ItemRows = Callable[[tuple[int, ...]], int]


def _rows_of_item(graph: ModuleGraph, adapters: Mapping[str, Adapter], name: str) -> ItemRows:
    """Rows that module `name` emits for one media item of a raw shape."""
    inputs = graph.inputs(name)
    if not inputs:
        return cache(adapters[name].item_rows)  # called for every item of every batch, and shapes are few
    before = _rows_of_item(graph, adapters, inputs[0].source)
    return cache(lambda shape: adapters[name].rows(before(shape)))


def _media_of(graph: ModuleGraph, name: str) -> str | None:
    inputs = graph.inputs(name)
    return _media_of(graph, inputs[0].source) if inputs else graph[name].media


def placeholder_rows(graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> dict[str, ItemRows]:
    """Per placeholder: a function from a media item's raw shape to its number of rows in the sink's sequence."""
    return {b.at: _rows_of_item(graph, adapters, b.source) for b in graph.boundaries if b.at is not None}


def module_rows(graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> dict[str, tuple[str | None, ItemRows]]:
    """Per module except the sink: the kind of media that its rows come from, and a function from an item's raw shape to
    the number of rows that it emits."""
    return {
        name: (_media_of(graph, name), _rows_of_item(graph, adapters, name))
        for name in graph.order
        if name != graph.sink.name
    }
