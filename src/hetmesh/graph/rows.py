"""Row space: the logical rows of one boundary in one microbatch. Layouts on both sides are splits of it."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Replicate

from hetmesh.graph.module_graph import LANE_AXES
from hetmesh.layout import Intervals, Layout, MeshSpec, RowSplit


@dataclass(frozen=True)
class RowSpace:
    """Rows (sample, row in sample), numbered through in the order of `samples`.

    Attributes:
        samples: indices of the samples in the global batch.
        counts: rows of each of them; 0 where a sample has none.
    """

    samples: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """All rows."""
        return sum(self.counts)

    @cached_property
    def _spans(self) -> dict[int, tuple[int, int]]:
        edges = [0, *itertools.accumulate(self.counts)]
        return dict(zip(self.samples, itertools.pairwise(edges), strict=True))

    def intervals(self, samples: Sequence[int]) -> Intervals:
        """The row intervals of some samples, in their order."""
        return self.intervals_of([samples])[0]

    def intervals_of(self, lanes: Sequence[Sequence[int]]) -> list[Intervals]:
        """The row intervals of the samples of some lanes, in their order."""
        spans = self._spans
        return [tuple([spans[sample] for sample in lane]) for lane in lanes]

    def by_sample(self, rows: Intervals) -> Iterator[tuple[int, int, int]]:
        """Row intervals as (sample, start, stop) with rows counted within the sample, in their order."""
        ends = self._ends
        for start, stop in rows:
            i = bisect_right(ends, start)
            while start < stop:
                first, end = ends[i] - self.counts[i], min(ends[i], stop)
                if start < end:
                    yield self.samples[i], start - first, end - first
                start, i = end, i + 1

    def part_of(self, runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
        """Of the rows of some samples (`by_sample` of another space), the intervals of those that are in this one."""
        for sample, start, stop in runs:
            if sample in self._spans:
                first = self._spans[sample][0]
                yield first + start, first + stop

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self.counts))


def lane_layout(mesh: MeshSpec, split: RowSplit, token_axes: Sequence[str] = ()) -> Layout:
    """Rows split over the lanes of a stage's mesh and, within a lane, over `token_axes`; replicated over its others."""
    name = "owner" if token_axes else "lane"
    mesh = mesh.merge((*LANE_AXES, *token_axes), name)
    return Layout(mesh, tuple(split if axis == name else Replicate() for axis in mesh.axes))
