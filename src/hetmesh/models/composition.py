"""What adapters make together, along the boundaries of a graph: row counts, positions, boundaries of side outputs.

A side output is a feature that a module emits besides its rows, which its consumer adds after some of its layers.
DeepStack (arXiv:2406.04334) in Qwen3-VL: layers inside the vision tower also emit features, one per image token, which
are added after the first layers of the LLM. Each is a separate boundary, straight to the pipeline stage that holds
its layer and, within it, to the rank that keeps the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph import ModuleGraph, SampleMeta
from hetmesh.graph.sample import LOSS_UNITS, kinds_of
from hetmesh.graph.topology import BoundarySpec
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
    """Per placeholder: a function from a media item's raw shape to its number of rows in the LLM's sequence: those that
    replace it, else those that a module after the LLM reads. Raises RecipeError: modules after it read other numbers.
    """
    found: dict[str, ItemRows] = {}
    placed = [(b, kinds_of(b.at)) for b in graph.boundaries if b.at is not None]
    for b, kinds in placed:
        for kind in kinds if not graph.out_of_llm(b) else ():
            found[kind] = _rows_of_item(graph, adapters, b.source)
    for b, kinds in placed:
        for kind in kinds if graph.out_of_llm(b) else ():
            reads = _rows_read(graph, adapters, b.destination)
            found[kind] = _alike(found[kind], reads, b) if kind in found else reads
    return found


def _rows_read(graph: ModuleGraph, adapters: Mapping[str, Adapter], name: str) -> ItemRows:
    """Rows of the LLM that a module after it reads of an item, directly or through modules that keep their number."""
    after = graph.outputs(name)
    return cache(adapters[name].item_rows) if not after else _rows_read(graph, adapters, after[0].destination)


def _alike(rows: ItemRows, reads: ItemRows, boundary: BoundarySpec) -> ItemRows:
    def checked(shape: tuple[int, ...]) -> int:
        if rows(shape) != reads(shape):
            raise SampleError(
                f"boundary {boundary.name}: {boundary.destination!r} reads {reads(shape)} hidden states of an item of "
                f"shape {shape}, which has {rows(shape)} tokens at {boundary.at!r}"
            )
        return rows(shape)

    return cache(checked)


def module_rows(graph: ModuleGraph, adapters: Mapping[str, Adapter]) -> dict[str, tuple[str | None, ItemRows]]:
    """Per module except the LLM: the kind of media of its rows, and from an item's raw shape the number of rows; after
    the LLM of those that it computes. Per boundary out of the LLM, by its key, of the hidden states; and per loss that
    does not count tokens, what it counts (`LOSS_UNITS`)."""
    found: dict[str, tuple[str | None, ItemRows]] = {}
    at = placeholder_rows(graph, adapters)
    for name in graph.order:
        if graph[name].media is not None and name in graph.topology.after_llm:
            found[name] = graph[name].media, cache(adapters[name].computed_rows)
        elif (placeholder := graph.topology.generated(name)) is not None:
            found[name] = placeholder, at[kinds_of(placeholder)[0]]  # it keeps the number of rows
        elif name != graph.llm.name:
            found[name] = _media_of(graph, name), _rows_of_item(graph, adapters, name)
    for b in graph.boundaries:
        if graph.out_of_llm(b) and b.at is not None:
            found[b.key] = b.at, at[kinds_of(b.at)[0]]
    for name, loss in graph.losses.items():
        if loss.unit != "tokens":
            count = {"latents": adapters[name].item_latents, "frames": lambda shape: shape[0], "items": lambda _: 1}
            found[name + LOSS_UNITS] = graph[name].media or _media_of(graph, name), cache(count[loss.unit])
    return found


def with_side_outputs(boundaries: Sequence[BoundarySpec], adapters: Mapping[str, Adapter]) -> tuple[BoundarySpec, ...]:
    """The boundaries of a recipe, each followed by those of the side outputs of its source."""
    found: list[BoundarySpec] = []
    for b in boundaries:
        found.append(b)
        for output in adapters[b.source].abilities.side_outputs:
            takes = adapters[b.destination].abilities.layer_of_output
            layer = takes(output) if takes is not None else None
            if layer is None:
                raise RecipeError(
                    f"boundary {b.name}: {b.source!r} also emits {output!r}, for which {b.destination!r} has no layer; "
                    "an LLM of model 'qwen3_vl_text' with enough layers takes it, straight from its encoder (or leave "
                    f"it out: modules.{b.source}.config.deepstack_visual_indexes)"
                )
            found.append(BoundarySpec(b.source, b.destination, b.at, output, layer))
    return tuple(found)


def sample_positions(
    graph: ModuleGraph, adapters: Mapping[str, Adapter]
) -> Callable[[SampleMeta], tuple[tuple[int, ...], ...]] | None:
    """A function from an expanded sample to its positions; None for an LLM whose positions are 0..tokens-1."""
    positions = adapters[graph.llm.name].abilities.position_ids
    if positions is None:
        return None
    grids = {
        kind: cache(grid)
        for b in graph.inputs(graph.llm.name)
        if b.at is not None and (grid := adapters[b.source].abilities.item_grid) is not None
        for kind in kinds_of(b.at)
    }
    return lambda meta: positions(meta, grids)
