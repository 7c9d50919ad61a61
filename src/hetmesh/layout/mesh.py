"""MeshSpec: the ranks of a module in order, with named axes. The truth; a DeviceMesh is its run-time handle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hetmesh.errors import LayoutError
from hetmesh.layout.hashing import HashedOnce
from hetmesh.layout.intervals import whole_numbers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MeshSpec(HashedOnce):
    """An n-dimensional arrangement of ranks.

    Attributes:
        ranks: global ranks in row-major order over `sizes`. Any distinct ranks: gaps and permutations are legal.
        axes: one name per mesh axis, e.g. `("dp", "tp")`.
        sizes: ranks along each axis; their product is `len(ranks)`.

    Raises:
        LayoutError: a rank is repeated or negative, a name is repeated, the sizes do not fit, or a number is not whole.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", whole_numbers(self.ranks, "the ranks of a mesh"))
        try:
            object.__setattr__(self, "axes", tuple(self.axes))
        except TypeError:
            raise LayoutError(f"a mesh needs a sequence of axis names, got {self.axes!r}") from None
        object.__setattr__(self, "sizes", whole_numbers(self.sizes, "the sizes of mesh axes"))
        if not all(isinstance(axis, str) for axis in self.axes):
            raise LayoutError(f"the names of mesh axes must be strings, got {self.axes}")
        if not self.axes or len(self.axes) != len(self.sizes):
            raise LayoutError(f"a mesh needs one size per axis: axes {self.axes}, sizes {self.sizes}")
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"mesh axes must have distinct names: {self.axes}")
        if any(s < 1 for s in self.sizes) or math.prod(self.sizes) != len(self.ranks):
            raise LayoutError(
                f"mesh axes {dict(zip(self.axes, self.sizes, strict=True))} hold {math.prod(self.sizes)} ranks, "
                f"but {len(self.ranks)} were given: {_short(self.ranks)}"
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise LayoutError(f"mesh ranks must be distinct and not negative: {_short(self.ranks)}")

    __hash__ = HashedOnce.__hash__

    @classmethod
    def make(cls, ranks: Iterable[int], /, **sizes: int) -> MeshSpec:
        """`MeshSpec.make(range(4), dp=2, tp=2)`: axes in the order given."""
        return cls(whole_numbers(ranks, "the ranks of a mesh"), tuple(sizes), tuple(sizes.values()))

    @classmethod
    def of(cls, device_mesh: DeviceMesh) -> MeshSpec:
        """The spec of a torch DeviceMesh. Unnamed mesh dims are called `dim_0`, `dim_1`, ..."""
        array = device_mesh.mesh
        names = device_mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(array.ndim))
        return cls(tuple(array.flatten().tolist()), tuple(names), tuple(array.shape))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def array(self) -> np.ndarray:
        """The ranks as an int64 array of shape `sizes`."""
        return np.asarray(self.ranks, dtype=np.int64).reshape(self.sizes)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.ranks)}

    def __contains__(self, rank: object) -> bool:
        return rank in self._positions

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Position of `rank` along each axis, or None if it is not a member."""
        position = self._positions.get(rank)
        if position is None:
            return None
        coordinate = []
        for size in reversed(self.sizes):
            position, c = divmod(position, size)
            coordinate.append(c)
        return tuple(reversed(coordinate))

    def axis_size(self, axis: str) -> int:
        """Ranks along `axis`; 1 for an axis that the mesh does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def axis_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The rank groups along `axis`, one per coordinate of the other axes, ranks in mesh order."""
        if axis not in self.axes:
            raise LayoutError(f"mesh has no axis {axis!r}; its axes are {self.axes}")
        moved = np.moveaxis(self.array, self.axes.index(axis), -1).reshape(-1, self.axis_size(axis))
        return tuple(tuple(row) for row in moved.tolist())

    def merge(self, axes: Iterable[str], name: str) -> MeshSpec:
        """The same ranks with adjacent `axes` flattened into one axis `name` (of size 1 in front if none exists).

        Lanes of a module are the merged data-parallel axes, for example.
        """
        present = [a for a in self.axes if a in set(axes)]
        if not present:
            return MeshSpec(self.ranks, (name, *self.axes), (1, *self.sizes))
        first = self.axes.index(present[0])
        last = first + len(present)
        if self.axes[first:last] != tuple(present):
            raise LayoutError(f"axes {present} are not adjacent in mesh axes {self.axes}")
        return MeshSpec(
            self.ranks,
            (*self.axes[:first], name, *self.axes[last:]),
            (*self.sizes[:first], math.prod(self.sizes[first:last]), *self.sizes[last:]),
        )

    def reordered(self, order: Sequence[int]) -> MeshSpec:
        """The same ranks with their axes in another order, by number."""
        ranks = tuple(self.array.transpose(order).ravel().tolist())
        return MeshSpec(ranks, tuple(self.axes[i] for i in order), tuple(self.sizes[i] for i in order))

    def slice(self, axis: str, coordinate: int) -> MeshSpec:
        """The ranks at `coordinate` of `axis`, without that axis (of size 1 if there is no other); itself where it has
        no such axis."""
        if axis not in self.axes:
            return self
        i = self.axes.index(axis)
        ranks = tuple(self.array.take(coordinate, axis=i).flatten().tolist())
        kept = [(a, s) for a, s in zip(self.axes, self.sizes, strict=True) if a != axis]
        return MeshSpec(ranks, tuple(a for a, _ in kept) or (axis,), tuple(s for _, s in kept) or (1,))

    def __str__(self) -> str:
        axes = ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.sizes, strict=True))
        return f"({axes}) on ranks {_short(self.ranks)}"


def _short(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} ranks)"
