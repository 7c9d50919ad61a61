"""BatchPlan: which samples each lane and microbatch of each module handles. A pure function of sample metadata."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hetmesh.balance.tokens import share_tokens
from hetmesh.context import Mask
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, Edge, ModuleGraph, ModuleSpec, RowSpace, SampleMeta
from hetmesh.graph.rows import lane_layout, owner_layout
from hetmesh.graph.tokens import LaneTokens, cut_out
from hetmesh.layout import Intervals, Layout, RowSplit

Lanes = tuple[tuple[int, ...], ...]
"""Sample indices per lane, in the order in which the lane processes them."""


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The assignment of one global batch.

    Attributes:
        graph: the modules it is for.
        samples: the global batch, expanded metadata, in order; everything refers to samples by their index here.
        lanes: per module name and microbatch, the samples of each lane.

    Raises:
        GraphError: a sample is missing or handled twice by some module.
    """

    graph: ModuleGraph
    samples: tuple[SampleMeta, ...]
    lanes: Mapping[str, tuple[Lanes, ...]]

    def __post_init__(self) -> None:
        everything = list(range(len(self.samples)))
        for name in self.graph.order:
            microbatches = self.lanes[name]
            given = sorted(i for lanes in microbatches for lane in lanes for i in lane)
            if given != everything:
                wrong = sorted({i for i in given if given.count(i) > 1} | set(everything) - set(given))
                raise GraphError(f"batch plan: module {name!r} must handle every sample once; wrong are {wrong[:8]}")
            if len(microbatches) != self.num_microbatches or any(
                len(lanes) != self.graph[name].num_lanes for lanes in microbatches
            ):
                raise GraphError(
                    f"batch plan: module {name!r} needs {self.num_microbatches} microbatches of "
                    f"{self.graph[name].num_lanes} lanes"
                )

    @property
    def num_microbatches(self) -> int:
        """Microbatches in the step, equal for all modules."""
        return len(self.lanes[self.graph.sink.name])

    @property
    def num_targets(self) -> int:
        """Valid target tokens of the whole global batch: the loss is normalised by this number, once."""
        return sum(sample.num_targets for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole global batch, placeholders included, padding excluded."""
        return sum(sample.tokens for sample in self.samples)

    def samples_of(self, module: str, microbatch: int, lane: int) -> tuple[int, ...]:
        """Indices of the samples that one lane handles in one microbatch."""
        return self.lanes[module][microbatch][lane]

    def row_space(self, boundary: BoundarySpec, microbatch: int) -> RowSpace:
        """The rows that the source of `boundary` emits in `microbatch`, by ascending sample index."""
        handled = tuple(sorted(i for lane in self.lanes[boundary.source][microbatch] for i in lane))
        return RowSpace(handled, tuple(self._rows(boundary, i) for i in handled))

    def _rows(self, boundary: BoundarySpec, index: int) -> int:
        sample = self.samples[index]
        if boundary.source not in sample.rows:
            raise GraphError(f"sample {sample.id!r} has no row count for module {boundary.source!r}; expand it first")
        return sample.rows[boundary.source]

    def layouts(self, boundary: BoundarySpec, microbatch: int) -> tuple[tuple[int, int], Layout, Layout]:
        """Global shape `[rows, features]` and the layouts on both sides of `boundary` in `microbatch`: on the last
        stage of its source and on the stage of its destination where it ends."""
        space = self.row_space(boundary, microbatch)
        source = self.graph[boundary.source]
        layout = self._source(source, microbatch, space)
        return (space.total, source.features), layout, self._destination(boundary, microbatch, space, layout)

    def _source(self, source: ModuleSpec, microbatch: int, space: RowSpace) -> Layout:
        lanes, mesh = self.lanes[source.name][microbatch], source.stage_mesh(-1)
        if not source.token_axes:
            return space.layout(mesh, lanes)
        kept: list[Intervals] = []
        for lane, samples in enumerate(lanes):
            rows, tokens = space.intervals(samples), self.lane_tokens(source.name, microbatch, lane)
            for share in tokens.shares:
                spans = [cut_out(rows, a // source.tokens_per_row, b // source.tokens_per_row) for a, b in share]
                kept.append(tuple(itertools.chain(*spans)))
        return owner_layout(mesh, source.token_axes, RowSplit(0, tuple(kept)))

    def _destination(self, boundary: BoundarySpec, microbatch: int, space: RowSpace, layout: Layout) -> Layout:
        source, module = self.graph[boundary.source], self.graph[boundary.destination]
        stage = self.graph.destination_stage(boundary)
        lanes, mesh = self.lanes[module.name][microbatch], module.stage_mesh(stage)
        if not module.token_axes or boundary.at is None:
            same = mesh == source.stage_mesh(-1) and lanes == self.lanes[source.name][microbatch]
            same = same and not source.token_axes
            return layout if same else space.layout(mesh, lanes)
        tokens = [self.lane_tokens(module.name, microbatch, lane) for lane in range(len(lanes))]
        own = [[(i, self.samples[i]) for i in lane] for lane in lanes]
        return space.token_layout(module, own, boundary.at, tokens, stage)

    @cached_property
    def _shared_tokens(self) -> dict[tuple[str, int, int], tuple[LaneTokens, Mask | None]]:
        return {}

    def _tokens(self, module: str, microbatch: int, lane: int) -> tuple[LaneTokens, Mask | None]:
        key = (module, microbatch, lane)
        if key not in self._shared_tokens:
            samples = [self.samples[i] for i in self.samples_of(*key)]
            self._shared_tokens[key] = share_tokens(self.graph[module], samples)
        return self._shared_tokens[key]

    def lane_tokens(self, module: str, microbatch: int, lane: int) -> LaneTokens:
        """Which rank keeps which tokens of one lane in one microbatch of a module that reads tokens, or media whose
        tokens its ranks share."""
        return self._tokens(module, microbatch, lane)[0]

    def lane_mask(self, module: str, microbatch: int, lane: int) -> Mask:
        """What the packed tokens of that lane see of each other."""
        mask = self._tokens(module, microbatch, lane)[1]
        assert mask is not None
        return mask

    def edge_layouts(self, edge: Edge, microbatch: int) -> tuple[tuple[int, int], Layout, Layout]:
        """As `layouts`, of a forward edge between stages: of a boundary, or of two stages of one module, whose
        activations lie alike on both sides."""
        if not edge.internal:
            boundary = self.graph.boundary(edge.source.module, edge.destination.module, edge.output)
            return self.layouts(boundary, microbatch)
        module = self.graph[edge.source.module]
        assert module.activation is not None
        lanes = self.lanes[module.name][microbatch]
        meshes = (module.stage_mesh(edge.source.index), module.stage_mesh(edge.destination.index))
        if module.token_axes:
            tokens = [self.lane_tokens(module.name, microbatch, lane) for lane in range(len(lanes))]
            counts = [own.rows(i) for own in tokens for i in range(len(own.shares) * own.parts)]
            split = RowSplit.counts(0, counts)
            src, dst = (owner_layout(mesh, module.token_axes, split) for mesh in meshes)
        else:
            counts = [module.activation_rows([self.samples[i] for i in lane]) for lane in lanes]
            split = RowSplit.counts(0, counts)
            src, dst = (lane_layout(mesh, split) for mesh in meshes)
        return (sum(counts), module.activation.features), src, dst
