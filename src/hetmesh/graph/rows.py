"""Row space: the logical rows of one boundary in one microbatch. Layouts on both sides are splits of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Replicate

from hetmesh.errors import GraphError
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
        spans, start = {}, 0
        for sample, count in zip(self.samples, self.counts, strict=True):
            spans[sample] = (start, start + count)
            start += count
        return spans

    def intervals(self, samples: Sequence[int]) -> Intervals:
        """The row intervals of some samples, in their order."""
        try:
            return tuple(self._spans[sample] for sample in samples)
        except KeyError as error:
            raise GraphError(f"sample {error.args[0]} is not in the row space of samples {self.samples}") from None

    def layout(self, mesh: MeshSpec, lanes: Sequence[Sequence[int]]) -> Layout:
        """The rows on the mesh of a stage, whose lane i holds the samples `lanes[i]`: split over lanes only.

        The tensor has shape `[total, features]`.
        """
        split = RowSplit(0, tuple(self.intervals(samples) for samples in lanes))
        return lane_layout(mesh, split)


def lane_layout(mesh: MeshSpec, split: RowSplit) -> Layout:
    """Rows split over the lanes of a stage's mesh and replicated over its other axes."""
    mesh = mesh.merge(LANE_AXES, "lane")
    return Layout(mesh, tuple(split if axis == "lane" else Replicate() for axis in mesh.axes))


def owner_layout(mesh: MeshSpec, token_axes: Sequence[str], split: RowSplit) -> Layout:
    """Rows split over the lanes of a stage's mesh and, within a lane, over `token_axes`."""
    mesh = mesh.merge((*LANE_AXES, *token_axes), "owner")
    return Layout(mesh, tuple(split if axis == "owner" else Replicate() for axis in mesh.axes))
