"""Routes: which rows of a boundary go where. The layouts on both sides of every edge, as a BatchPlan fixes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.context.token_owners import LaneTokens, cut_out, owned_rows
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, Edge, ModuleSpec, RowSpace
from hetmesh.graph.rows import lane_layout, owner_layout
from hetmesh.layout import Intervals, Layout, RowSplit

EdgeLayouts = tuple[tuple[int, int], Layout, Layout]
"""Global shape `[rows, features]` of what flows over an edge in a microbatch, and its layouts at source and
destination."""


def row_space(plan: BatchPlan, boundary: BoundarySpec, microbatch: int) -> RowSpace:
    """The rows that the source of `boundary` emits in `microbatch`, by ascending sample index.

    Raises:
        GraphError: the metadata of a sample was not expanded for the source.
    """
    handled = tuple(sorted(i for lane in plan.lanes[boundary.source][microbatch] for i in lane))
    return RowSpace(handled, tuple(_rows(plan, boundary, i) for i in handled))


def _rows(plan: BatchPlan, boundary: BoundarySpec, index: int) -> int:
    sample = plan.samples[index]
    if boundary.source not in sample.rows:
        raise GraphError(f"sample {sample.id!r} has no row count for module {boundary.source!r}; expand it first")
    return sample.rows[boundary.source]


def boundary_layouts(plan: BatchPlan, boundary: BoundarySpec, microbatch: int) -> EdgeLayouts:
    """What flows over `boundary` in `microbatch`: from the last stage of its source to the stage of its destination
    where it ends."""
    space = row_space(plan, boundary, microbatch)
    source = plan.graph[boundary.source]
    layout = _source(plan, source, microbatch, space)
    return (space.total, source.features), layout, _destination(plan, boundary, microbatch, space, layout)


def edge_layouts(plan: BatchPlan, edge: Edge, microbatch: int) -> EdgeLayouts:
    """What flows over a forward edge between stages in `microbatch`: of a boundary, or of two stages of one module,
    whose activations lie alike on both sides."""
    if not edge.internal:
        boundary = plan.graph.boundary(edge.source.module, edge.destination.module, edge.output)
        return boundary_layouts(plan, boundary, microbatch)
    module = plan.graph[edge.source.module]
    assert module.activation is not None
    lanes = plan.lanes[module.name][microbatch]
    meshes = (module.stage_mesh(edge.source.index), module.stage_mesh(edge.destination.index))
    if module.token_axes:
        tokens = [plan.lane_tokens(module.name, microbatch, lane) for lane in range(len(lanes))]
        counts = [own.rows(i) for own in tokens for i in range(len(own.shares) * own.parts)]
        split = RowSplit.counts(0, counts)
        src, dst = (owner_layout(mesh, module.token_axes, split) for mesh in meshes)
    else:
        counts = [module.activation_rows([plan.samples[i] for i in lane]) for lane in lanes]
        split = RowSplit.counts(0, counts)
        src, dst = (lane_layout(mesh, split) for mesh in meshes)
    return (sum(counts), module.activation.features), src, dst


def _source(plan: BatchPlan, source: ModuleSpec, microbatch: int, space: RowSpace) -> Layout:
    lanes, mesh = plan.lanes[source.name][microbatch], source.stage_mesh(-1)
    if not source.token_axes:
        return space.layout(mesh, lanes)
    kept: list[Intervals] = []
    for lane, samples in enumerate(lanes):
        rows, tokens = space.intervals(samples), plan.lane_tokens(source.name, microbatch, lane)
        for share in tokens.shares:
            spans = [cut_out(rows, a // source.tokens_per_row, b // source.tokens_per_row) for a, b in share]
            kept.append(tuple(itertools.chain(*spans)))
    return owner_layout(mesh, source.token_axes, RowSplit(0, tuple(kept)))


def _destination(plan: BatchPlan, boundary: BoundarySpec, microbatch: int, space: RowSpace, layout: Layout) -> Layout:
    source, module = plan.graph[boundary.source], plan.graph[boundary.destination]
    stage = plan.graph.destination_stage(boundary)
    lanes, mesh = plan.lanes[module.name][microbatch], module.stage_mesh(stage)
    if module.token_axes and boundary.at is not None:
        tokens = [plan.lane_tokens(module.name, microbatch, lane) for lane in range(len(lanes))]
        return _token_layout(plan, module, stage, lanes, boundary.at, tokens, space)
    same = mesh == source.stage_mesh(-1) and lanes == plan.lanes[source.name][microbatch] and not source.token_axes
    return layout if same else space.layout(mesh, lanes)


def _token_layout(
    plan: BatchPlan,
    module: ModuleSpec,
    stage: int,
    lanes: Sequence[Sequence[int]],
    at: str,
    tokens: Sequence[LaneTokens],
    space: RowSpace,
) -> Layout:
    """The rows where the ranks of a lane share its tokens: each gets those whose placeholders `at` it keeps."""
    intervals = []
    for lane, own in zip(lanes, tokens, strict=True):
        samples = [plan.samples[i] for i in lane]
        starts = [start for start, _ in space.intervals(lane)]
        intervals += [owned_rows(samples, starts, at, own, i) for i in range(len(own.shares) * own.parts)]
    return owner_layout(module.stage_mesh(stage), module.token_axes, RowSplit(0, tuple(intervals)))
