"""BatchPlan: which samples each lane and microbatch of each module handles. A pure function of sample metadata."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh.context import Mask
from hetmesh.context.token_owners import LaneTokens, share_tokens
from hetmesh.cost.work import samples_work
from hetmesh.errors import GraphError
from hetmesh.graph import BoundarySpec, MetaArrays, ModuleGraph, Routes, SampleMeta
from hetmesh.graph.meta_arrays import UNKNOWN
from hetmesh.graph.sample import LOSS_UNITS
from hetmesh.layout.hashing import memoized

Lanes = tuple[tuple[int, ...], ...]
"""Sample indices per lane, in the order in which the lane processes them."""


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The assignment of one global batch.

    Attributes:
        graph: the modules it is for.
        samples: the global batch, expanded metadata, in the order of the indices that all else refers to.
        lanes: per module name and microbatch, the samples of each lane. Modules may have different numbers of
            microbatches and handle a sample in any of them: `routes` follow.

    Raises:
        GraphError: a sample is missing or handled twice by some module, or a module lacks lanes or microbatches.
    """

    graph: ModuleGraph
    samples: Sequence[SampleMeta]
    lanes: Mapping[str, tuple[Lanes, ...]]

    def __post_init__(self) -> None:
        for name in self.graph.order:
            microbatches, lanes = self.lanes[name], self.graph[name].num_lanes
            if not microbatches or any(len(microbatch) != lanes for microbatch in microbatches):
                raise GraphError(f"batch plan: module {name!r} needs microbatches of {lanes} lanes")
            self.microbatch_of(name)  # which looks for samples that are missing or there twice

    @memoized
    def microbatch_of(self, module: str) -> np.ndarray:
        """Per sample, the microbatch in which a module handles it; int64 `[samples]`."""
        microbatches = self.lanes[module]
        sizes = [sum(map(len, lanes)) for lanes in microbatches]
        order = itertools.chain.from_iterable(itertools.chain.from_iterable(microbatches))
        samples, count = np.fromiter(order, np.int64), len(self.samples)
        inside = samples[(samples >= 0) & (samples < count)]
        times = np.bincount(inside, minlength=count)
        if len(samples) != count or (times != 1).any():
            wrong = sorted({*np.flatnonzero(times != 1).tolist(), *set(samples.tolist()) - set(range(count))})
            raise GraphError(f"batch plan: module {module!r} must handle every sample once; wrong are {wrong[:8]}")
        microbatch = np.empty(count, np.int64)
        microbatch[samples] = np.repeat(np.arange(len(sizes)), sizes)
        return microbatch

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the LLM; modules before it may have more or fewer."""
        return len(self.lanes[self.graph.llm.name])

    @cached_property
    def routes(self) -> Routes:
        """How many microbatches modules have, and which feed which: those that share a sample with rows. Where no rows
        go anywhere but to the same number, each number feeds itself, also without any rows. Raises GraphError: the
        metadata of a sample was not expanded."""
        pairs = {}
        for boundary in self.graph.boundaries:
            ends = boundary.source, boundary.destination
            if ends not in pairs and not self.in_step(*ends):
                source, destination = (self.microbatch_of(name) for name in ends)
                moved = self.row_counts(boundary) > 0
                if len(self.lanes[ends[0]]) != len(self.lanes[ends[1]]) or (source != destination)[moved].any():
                    pairs[ends] = zip(source[moved].tolist(), destination[moved].tolist(), strict=True)
        return Routes.make({name: len(self.lanes[name]) for name in self.graph.order}, pairs)

    def in_step(self, source: str, destination: str) -> bool:
        """Whether two modules handle the same samples in microbatches of the same numbers."""
        same = len(self.lanes[source]) == len(self.lanes[destination])
        return same and bool((self.microbatch_of(source) == self.microbatch_of(destination)).all())

    @cached_property
    def metas(self) -> MetaArrays:
        return MetaArrays.of(self.samples)

    def row_counts(self, boundary: BoundarySpec) -> np.ndarray:
        """Rows of each sample that go over `boundary`; int64 `[samples]`. Raises GraphError: one was not expanded."""
        return self._rows(boundary.key if self.graph.out_of_llm(boundary) else boundary.source)

    def _rows(self, key: str) -> np.ndarray:
        rows = self.metas.rows.get(key)
        if rows is None:
            rows = np.full(len(self.samples), UNKNOWN)
        if (missing := np.flatnonzero(rows == UNKNOWN)).size:
            sample = self.samples[int(missing[0])]
            raise GraphError(f"sample {sample.id!r} has no row count for module {key!r}; expand it first")
        return rows

    @property
    def num_targets(self) -> int:
        """Valid target tokens of the whole global batch."""
        return int(self.metas.num_targets.sum())

    @cached_property
    def loss_counts(self) -> dict[str, int]:
        """Per module with a loss what its sum over the whole global batch is divided by, once."""
        return {name: int(self.counted(name).sum()) for name in self.graph.losses}

    def counted(self, name: str) -> np.ndarray:
        """What the loss of a module counts of each sample."""
        return self.metas.num_targets if self.graph.losses[name].unit == "tokens" else self._rows(name + LOSS_UNITS)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole global batch, placeholders included, padding excluded."""
        return int(self.metas.tokens.sum())

    def samples_of(self, module: str, microbatch: int, lane: int) -> tuple[int, ...]:
        """Indices of the samples that one lane handles in one microbatch."""
        return self.lanes[module][microbatch][lane]

    @memoized
    def _tokens(self, module: str, microbatch: int, lane: int) -> tuple[LaneTokens, Mask | None]:
        samples = [self.samples[i] for i in self.samples_of(module, microbatch, lane)]
        return share_tokens(self.graph[module], samples)

    def lane_work(self, module: str) -> np.ndarray:
        """The work of a module: rows, pairs and targets of each lane in each microbatch; int64
        `[microbatches, lanes, 3]`."""
        of_samples = samples_work(self.graph, module, self.metas)
        bins = [lane for lanes in self.lanes[module] for lane in lanes]
        order = np.fromiter(itertools.chain.from_iterable(bins), np.int64)
        sums = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(of_samples[order], axis=0)])
        ends = np.concatenate([[0], np.cumsum(list(map(len, bins)))])
        return (sums[ends[1:]] - sums[ends[:-1]]).reshape(len(self.lanes[module]), -1, 3)

    def lane_tokens(self, module: str, microbatch: int, lane: int) -> LaneTokens:
        """Which rank keeps which tokens, or tokens of media, of one lane in one microbatch of a module."""
        return self._tokens(module, microbatch, lane)[0]

    def lane_mask(self, module: str, microbatch: int, lane: int) -> Mask:
        """What the packed tokens of that lane see of each other."""
        mask = self._tokens(module, microbatch, lane)[1]
        assert mask is not None
        return mask
