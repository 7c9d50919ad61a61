"""Which rows of a boundary go where: the layouts on both sides of every edge and route, as a plan fixes them."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np

from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.context.token_owners import cut_out, owned_rows
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, Edge, RowSpace
from hetmesh.graph.rows import lane_layout
from hetmesh.layout import Intervals, Layout, RowSplit

EdgeLayouts = tuple[tuple[int, int], Layout, Layout]
"""Global shape `[rows, features]` of what flows along a route, and its layouts at source and destination."""

Side = Literal["source", "destination"]
"""Of a boundary."""

Runs = tuple[tuple[int, int], ...]
"""Rows of a rank in their order, as (microbatch of the other side, rows) runs: those of each microbatch together, in
their order, are what the route to or from it carries."""


def row_space(plan: BatchPlan, boundary: BoundarySpec, microbatch: int, to: int | None = None) -> RowSpace:
    """The rows that go over `boundary` from `microbatch` of its source to microbatch `to` of its destination (default:
    the same number), by ascending sample index. Raises GraphError: a sample was not expanded for the source."""
    space = _all_rows(plan, boundary, boundary.source, microbatch)
    if plan.in_step(boundary.source, boundary.destination):
        return space
    other, to = plan.microbatch_of(boundary.destination), microbatch if to is None else to
    kept = [(i, count) for i, count in zip(space.samples, space.counts, strict=True) if other[i] == to]
    return RowSpace(tuple(i for i, _ in kept), tuple(count for _, count in kept))


def _all_rows(plan: BatchPlan, boundary: BoundarySpec, module: str, microbatch: int) -> RowSpace:
    """Those of the samples of a microbatch of one side, wherever they come from or go."""
    handled = np.sort(np.fromiter(itertools.chain.from_iterable(plan.lanes[module][microbatch]), np.int64))
    return RowSpace(tuple(handled.tolist()), tuple(plan.row_counts(boundary)[handled].tolist()))


def boundary_layouts(plan: BatchPlan, boundary: BoundarySpec, microbatch: int, to: int | None = None) -> EdgeLayouts:
    """What flows over `boundary` from `microbatch` of its source to microbatch `to` of its destination (default: the
    same number): from the last stage of its source to the stage of its destination where it ends."""
    to = microbatch if to is None else to
    space = row_space(plan, boundary, microbatch, to)
    source, destination = _End(plan, boundary, "source", microbatch), _End(plan, boundary, "destination", to)
    layout = source.layout(space)
    alike = source.mesh == destination.mesh and source.lanes == destination.lanes
    shape = (space.total, plan.graph[boundary.source].features)
    if alike and not source.token_axes and not destination.token_axes:
        return shape, layout, layout
    return shape, layout, destination.layout(space)


def edge_layouts(plan: BatchPlan, edge: Edge, microbatch: int, to: int | None = None) -> EdgeLayouts:
    """What flows over a forward edge of stages: of a boundary, from `microbatch` of its source to `to` of its
    destination (default: the same); or of two stages of one module, whose activations lie alike on both sides."""
    if not edge.internal:
        return boundary_layouts(plan, boundary_of(plan, edge), microbatch, to)
    module = plan.graph[edge.source.module]
    assert module.activation is not None
    lanes = plan.lanes[module.name][microbatch]
    meshes = (module.stage_mesh(edge.source.index), module.stage_mesh(edge.destination.index))
    if module.token_axes:
        tokens = [plan.lane_tokens(module.name, microbatch, lane) for lane in range(len(lanes))]
        counts = [own.rows(i) for own in tokens for i in range(len(own.shares) * own.parts)]
    else:
        counts = [module.activation_rows([plan.samples[i] for i in lane]) for lane in lanes]
    split = RowSplit.counts(0, counts)
    src, dst = (lane_layout(mesh, split, module.token_axes) for mesh in meshes)
    return (sum(counts), module.activation.features), src, dst


def route_runs(plan: BatchPlan, edge: Edge, side: Side, microbatch: int, rank: int) -> Runs:
    """The rows that `rank` holds of one microbatch on one side of an edge between modules, over all routes together: as
    the source emits them, or as the destination wants them."""
    boundary = boundary_of(plan, edge)
    end = _End(plan, boundary, side, microbatch)
    space = _all_rows(plan, boundary, end.module.name, microbatch)
    rows = end.layout(space).intervals((space.total, 1), rank)[0]
    other = plan.microbatch_of(boundary.destination if side == "source" else boundary.source)
    runs: list[tuple[int, int]] = []
    for sample, start, stop in space.by_sample(rows):
        m, count = int(other[sample]), stop - start
        if runs and runs[-1][0] == m:
            count += runs.pop()[1]
        runs.append((m, count))
    return tuple(runs)


def boundary_of(plan: BatchPlan, edge: Edge) -> BoundarySpec:
    """The boundary of an edge between modules."""
    return plan.graph.boundary(edge.source.module, edge.destination.module, edge.output)


class _End:
    """One side of a boundary in one of its microbatches."""

    def __init__(self, plan: BatchPlan, boundary: BoundarySpec, side: Side, microbatch: int) -> None:
        self.plan, self.boundary, self.side, self.microbatch = plan, boundary, side, microbatch
        self.module = plan.graph[boundary.source if side == "source" else boundary.destination]
        self.lanes = plan.lanes[self.module.name][microbatch]
        stage = plan.graph.source_stage(boundary) if side == "source" else plan.graph.destination_stage(boundary)
        self.mesh = self.module.stage_mesh(stage)
        # A module that consumes rows as such has them lane by lane, also where its ranks share its tokens. The hidden
        # states of the LLM are where their tokens are.
        shared = side == "source" or boundary.at is not None
        self.token_axes = self.module.token_axes if shared else ()

    def layout(self, space: RowSpace) -> Layout:
        """Of those of its rows that are in `space`: each rank has its own in the order of its samples and tokens."""
        whole = _all_rows(self.plan, self.boundary, self.module.name, self.microbatch)
        kept = self._kept(whole)
        if whole.samples != space.samples:
            kept = [tuple(space.part_of(whole.by_sample(rows))) for rows in kept]
        split = RowSplit(0, tuple(kept))
        return lane_layout(self.mesh, split, self.token_axes)

    def _kept(self, whole: RowSpace) -> list[Intervals]:
        """Per lane, and within a lane per rank that shares its tokens, the rows that it keeps, in its order."""
        if not self.token_axes:
            return whole.intervals_of(self.lanes)
        tokens = [self.plan.lane_tokens(self.module.name, self.microbatch, i) for i in range(len(self.lanes))]
        kept: list[Intervals] = []
        for lane, own in zip(self.lanes, tokens, strict=True):
            rows, owners = whole.intervals(lane), range(len(own.shares) * own.parts)
            if self.side == "source" and not self.plan.graph.out_of_llm(self.boundary):
                unit = self.module.tokens_per_row
                if not unit:
                    raise GraphError(
                        f"module {self.module.name!r}: its ranks along {self.token_axes} share the tokens of its "
                        "media, but tokens_per_row, how many make a row, is 0; give it data parallel ranks instead"
                    )
                cuts = ([cut_out(rows, a // unit, b // unit) for a, b in own.kept(i)] for i in owners)
                kept += [tuple(itertools.chain(*cut)) for cut in cuts]
            else:
                assert self.boundary.at is not None
                samples, starts = [self.plan.samples[i] for i in lane], [start for start, _ in rows]
                kept += [owned_rows(samples, starts, self.boundary.at, own, i) for i in owners]
        return kept
