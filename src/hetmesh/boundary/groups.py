"""The process groups of a job, as a pure function of its graph: those that axes, edges and tied weights need, no more.

A group costs every rank a connection to its members and, on NCCL, device memory on each of them. Messages between two
ranks need no group of their own: they travel on the group of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hetmesh.boundary.transport import MEMORY, may_use_all_to_all
from hetmesh.cost import ModuleShape
from hetmesh.graph import ModuleGraph, ModuleSpec, StageGraph, dense_mesh, stage_graph
from hetmesh.layout import MeshSpec

Ranks = tuple[int, ...]
"""A process group: its ranks in order."""


def job_groups(
    graph: ModuleGraph, world_size: int, tied: Callable[[ModuleSpec], bool], link: str = ""
) -> tuple[Ranks, ...]:
    """All groups of several ranks of a job, besides torch's default one, in the order in which every rank makes them.

    Args:
        tied: whether the first and the last stage of a module share a weight that is trained.
        link: what carries messages (`World.link`), as far as it is known: edges need no groups where it is `MEMORY`.
    """
    groups: dict[Ranks, None] = {}
    for name in graph.order:
        spec = graph[name]
        for i in range(spec.mesh.axis_size("pp")):
            for mesh in stage_meshes(spec, i):
                groups |= dict.fromkeys(mesh_groups(mesh))
        if tied(spec):
            groups |= dict.fromkeys(tied_pairs(spec))
    groups |= dict.fromkeys(edge_groups(stage_graph(graph), link=link))
    groups[tuple(range(world_size))] = None  # losses, norms and metrics
    return tuple(ranks for ranks in groups if len(ranks) > 1)


def stage_meshes(spec: ModuleSpec, stage: int) -> tuple[MeshSpec, ...]:
    """The meshes of a stage: its own, and where FSDP shards parameters over `ep` that are no experts, theirs."""
    mesh = spec.stage_mesh(stage)
    return (mesh, dense_mesh(mesh)) if "ep" in mesh.axes and "dp_shard" in mesh.axes else (mesh,)


def mesh_groups(spec: MeshSpec) -> Iterator[Ranks]:
    """One group per axis and coordinate of the other axes."""
    for axis in spec.axes:
        yield from spec.axis_groups(axis)


def tied_pairs(spec: ModuleSpec) -> Iterator[Ranks]:
    """The ranks of the first and last stage that hold the same shard, pair by pair; none where they are one."""
    if spec.mesh.axis_size("pp") > 1:
        for pair in zip(spec.stage_mesh(0).ranks, spec.stage_mesh(-1).ranks, strict=True):
            yield tuple(sorted(pair))


def ends_are_tied(spec: ModuleSpec, shape: ModuleShape | None) -> bool:
    """Whether the first and the last stage of a module share a weight that is trained; assumed where it is not known.

    Args:
        shape: its sizes; None for a module that cannot be built without its weights.
    """
    if spec.mesh.axis_size("pp") == 1 or not spec.trainable:
        return False
    if shape is None:
        return True
    first, last = (
        {
            weight.name
            for layer in shape.layers
            if layer.name in spec.stage_layers(i)
            for weight in layer.weights
            if weight.trainable
        }
        for i in (0, spec.num_stages - 1)
    )
    return bool(first & last)


def edge_groups(stages: StageGraph, transport: str = "auto", link: str = "") -> Iterator[Ranks]:
    """The groups that edges may need: those whose transfers may be carried by an all-to-all."""
    if link == MEMORY and transport == "auto":
        return
    for edge in stages.edges:
        ranks = tuple(sorted({*stages.ranks_of(edge.source), *stages.ranks_of(edge.destination)}))
        if may_use_all_to_all(len(ranks), transport):
            yield ranks


def most_on_a_rank(groups: tuple[Ranks, ...]) -> int:
    """How many groups the rank with most of them is a member of."""
    counts: dict[int, int] = {}
    for ranks in groups:
        for rank in ranks:
            counts[rank] = counts.get(rank, 0) + 1
    return max(counts.values(), default=0)
