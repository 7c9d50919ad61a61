"""Layout: a MeshSpec and one placement per axis. With a global shape it says which rank holds what."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement

from hetmesh._torch_compat import StridedShard
from hetmesh.errors import LayoutError
from hetmesh.layout.cells import Cells, cut
from hetmesh.layout.hashing import HashedOnce
from hetmesh.layout.intervals import Intervals, check_shape, extent
from hetmesh.layout.mesh import MeshSpec
from hetmesh.layout.placements import Placement, RowSplit, check_placements, sharded_dim


@dataclass(frozen=True)
class Layout(HashedOnce):
    """How a tensor lies on a mesh.

    Attributes:
        mesh: the ranks.
        placements: one per mesh axis: `Shard`, `Replicate`, `Partial` ("sum"), a legal `_StridedShard` (as FSDP2 over
            tensor parallelism makes it) or `RowSplit`. Uneven shards follow `torch.chunk`, empty ones included.

    Raises:
        LayoutError: a placement that cannot be moved exactly; the message names the mesh axis.
    """

    mesh: MeshSpec
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, MeshSpec):
            raise LayoutError(f"the mesh of a layout must be a MeshSpec, got {self.mesh!r}; MeshSpec.of(device_mesh)?")
        try:
            object.__setattr__(self, "placements", tuple(self.placements))
        except TypeError:
            raise LayoutError(f"a layout needs a sequence of placements, got {self.placements!r}") from None
        check_placements(self.placements, self.mesh.axes, self.mesh.sizes)

    __hash__ = HashedOnce.__hash__

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """Mesh axes along which the ranks hold summands."""
        return tuple(i for i, p in enumerate(self.placements) if isinstance(p, Partial))

    @cached_property
    def replica_axes(self) -> tuple[int, ...]:
        """Mesh axes along which the ranks hold the same elements."""
        return tuple(i for i, p in enumerate(self.placements) if isinstance(p, Replicate))

    @property
    def is_dtensor(self) -> bool:
        """Whether every placement is torch's own, so that a DTensor can carry it."""
        return not any(isinstance(p, RowSplit) for p in self.placements)

    @property
    def torch_placements(self) -> tuple[TorchPlacement, ...]:
        """The placements for a DTensor. Raises LayoutError if one of them is a RowSplit."""
        if not self.is_dtensor:
            raise LayoutError(f"a DTensor cannot carry {self}; use the local tensor")
        return tuple(p for p in self.placements if not isinstance(p, RowSplit))

    def cells(self, shape: tuple[int, ...]) -> tuple[Cells, ...]:
        """One Cells per tensor dim of a tensor of global `shape`. Raises LayoutError where a placement does not fit."""
        return _cells(self, shape if type(shape) is tuple else check_shape(shape))

    def intervals(self, shape: tuple[int, ...], rank: int) -> tuple[Intervals, ...]:
        """Per tensor dim the ordered global intervals whose concatenation is the local extent of `rank`."""
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            raise LayoutError(f"rank {rank} is not a member of the mesh {self.mesh}")
        return tuple(cells.intervals(cells.cell_of(coordinate)) for cells in self.cells(shape))

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        return tuple(extent(rows) for rows in self.intervals(shape, rank))

    def gradient(self) -> Layout:
        """The layout of the gradient: Shard -> Shard, Replicate -> Replicate, Partial -> Replicate."""
        if not self.partial_axes:
            return self
        return replace(self, placements=tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements))

    def canonical(self, shape: tuple[int, ...]) -> Layout:
        """The layout in which each element of a Partial tensor gets one owner, after a reduce-scatter.

        The Replicate and Partial axes move after the others and shard one tensor dim: the longest local extent that
        they divide evenly on every rank, or the longest one if there is none (ties: the first).
        """
        free = sorted((*self.partial_axes, *self.replica_axes))
        # A strided shard cuts last, so as a plain Shard after the others it means the same.
        kept = sorted((i for i in range(self.mesh.ndim) if i not in free), key=self._is_strided)
        parts = math.prod(self.mesh.sizes[i] for i in free)
        cells = self.cells(shape)
        if not cells:
            raise LayoutError(f"a 0-d tensor cannot be Partial at a boundary ({self}); give it a dim of size 1")

        def score(dim: int) -> tuple[bool, int, int]:
            extents = cells[dim].extents
            return not (extents % parts).any(), int(extents.max()), -dim

        dim = max(range(len(shape)), key=score)
        plain = (Shard(sharded_dim(p) or 0) if self._is_strided(i) else p for i, p in enumerate(self.placements))
        by_axis = dict(enumerate(plain))
        return Layout(self.mesh.reordered([*kept, *free]), (*(by_axis[i] for i in kept), *(Shard(dim) for _ in free)))

    def _is_strided(self, axis: int) -> bool:
        return isinstance(self.placements[axis], StridedShard)

    def __str__(self) -> str:
        parts = ", ".join(
            f"{a}={s}: {p}" for a, s, p in zip(self.mesh.axes, self.mesh.sizes, self.placements, strict=True)
        )
        return f"Layout({parts}; ranks {list(self.mesh.ranks[:16])}{'...' if self.mesh.size > 16 else ''})"


@lru_cache(maxsize=256)
def _cells(layout: Layout, shape: tuple[int, ...]) -> tuple[Cells, ...]:
    check_shape(shape)
    for placement, axis in zip(layout.placements, layout.mesh.axes, strict=True):
        dim = sharded_dim(placement)
        if dim is not None and dim >= len(shape):
            raise LayoutError(f"mesh axis {axis!r}: {placement} splits a dim that shape {shape} does not have")
        if isinstance(placement, RowSplit) and placement.arrays[1].max(initial=0) > shape[dim or 0]:
            raise LayoutError(
                f"mesh axis {axis!r}: {placement} names rows beyond the {shape[dim or 0]} of shape {shape}"
            )
    return tuple(cut(size, layout.placements, layout.mesh.sizes, dim) for dim, size in enumerate(shape))
