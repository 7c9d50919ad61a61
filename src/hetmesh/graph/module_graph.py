"""ModuleGraph: which modules exist, on which meshes, and the boundaries between them. Static values, no nn.Module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hetmesh.errors import GraphError
from hetmesh.layout.mesh import MeshSpec

LANE_AXES = ("dp_replicate", "dp_shard")
"""Mesh axes along which a module processes different samples; one coordinate of them together is a lane."""


@dataclass(frozen=True)
class ModuleSpec:
    """One module of the graph.

    Attributes:
        name: the recipe's name for it, e.g. `"vision"`.
        mesh: its ranks. Axes are a subset of `pp, dp_replicate, dp_shard, cp, tp`, in that order.
        layers: names of its layers in execution order; pipeline stages are contiguous runs of them.
        media: the kind of media an encoder reads (`"image"`), None for a module that reads rows or tokens only.
        trainable: False freezes every parameter of the module.
        features: width of the rows that it emits; 0 for the module that computes the loss.
        token_axes: mesh axes over which the ranks of a lane share its tokens (`graph.tokens.TokenShares`); rows that
            replace placeholders then go to the rank that keeps their token, and to no other.
    """

    name: str
    mesh: MeshSpec
    layers: tuple[str, ...] = ()
    media: str | None = None
    trainable: bool = True
    features: int = 0
    token_axes: tuple[str, ...] = ()

    @cached_property
    def lane_mesh(self) -> MeshSpec:
        """The mesh with its data-parallel axes merged into one axis `lane`."""
        return self.mesh.merge(LANE_AXES, "lane")

    @property
    def num_lanes(self) -> int:
        """Data-parallel coordinates: how many different sets of samples the module processes at a time."""
        return self.lane_mesh.axis_size("lane")

    def lane_of(self, rank: int) -> int | None:
        """The lane that `rank` belongs to, or None if it is not a member."""
        coordinate = self.lane_mesh.coordinate(rank)
        return None if coordinate is None else coordinate[self.lane_mesh.axes.index("lane")]


@dataclass(frozen=True)
class BoundarySpec:
    """An edge of the graph: rows of `source` go to `destination`.

    Attributes:
        at: the placeholder whose tokens the rows replace; None where the destination consumes rows as such.
    """

    source: str
    destination: str
    at: str | None = None

    @property
    def name(self) -> str:
        """How logs and errors call it: `"vision->projector"`."""
        return f"{self.source}->{self.destination}"


@dataclass(frozen=True)
class ModuleGraph:
    """A DAG of modules with one sink (the module that computes the loss).

    Raises:
        GraphError: unknown or repeated names, a cycle, or not exactly one sink.
    """

    modules: tuple[ModuleSpec, ...]
    boundaries: tuple[BoundarySpec, ...] = ()

    def __post_init__(self) -> None:
        names = [m.name for m in self.modules]
        if len(set(names)) != len(names):
            raise GraphError(f"modules must have distinct names: {names}")
        for b in self.boundaries:
            for end in (b.source, b.destination):
                if end not in names:
                    raise GraphError(f"boundary {b.name}: there is no module {end!r}; modules are {names}")
        ends = [b.name for b in self.boundaries]
        if len(set(ends)) != len(ends):
            raise GraphError(f"at most one boundary between two modules: {ends}")
        sinks = [n for n in names if all(b.source != n for b in self.boundaries)]
        if len(sinks) != 1:
            raise GraphError(f"exactly one module may have no consumer (it computes the loss), got {sinks}")
        if len(self.order) != len(names):
            raise GraphError(f"boundaries form a cycle among {sorted(set(names) - set(self.order))}")

    @cached_property
    def _by_name(self) -> dict[str, ModuleSpec]:
        return {m.name: m for m in self.modules}

    def __getitem__(self, name: str) -> ModuleSpec:
        return self._by_name[name]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Module names, producers before consumers; ties in the order given."""
        done: list[str] = []
        pending = [m.name for m in self.modules]
        while ready := [n for n in pending if all(b.source in done for b in self.inputs(n))]:
            done.append(ready[0])
            pending.remove(ready[0])
        return tuple(done)

    @cached_property
    def sink(self) -> ModuleSpec:
        """The module that computes the loss."""
        return self[self.order[-1]]

    def inputs(self, name: str) -> tuple[BoundarySpec, ...]:
        """Boundaries into module `name`, in the order given."""
        return tuple(b for b in self.boundaries if b.destination == name)

    def outputs(self, name: str) -> tuple[BoundarySpec, ...]:
        """Boundaries out of module `name`, in the order given."""
        return tuple(b for b in self.boundaries if b.source == name)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all modules, ascending."""
        return tuple(sorted({r for m in self.modules for r in m.mesh.ranks}))

    def backward_reaches(self, name: str) -> bool:
        """Whether module `name` needs a backward: it or anything upstream of it is trainable."""
        return self[name].trainable or any(self.backward_reaches(b.source) for b in self.inputs(name))

    def needs_gradient(self, boundary: BoundarySpec) -> bool:
        """Whether a gradient flows back through `boundary`: something upstream of it is trainable."""
        return self.backward_reaches(boundary.source)
