"""The process groups of a job, as a pure function of its graph: those that axes, edges and tied weights need, no more.

A group costs every rank a connection to its members and, on NCCL, device memory on each of them. Messages between two
ranks need no group of their own on gloo, which has tags: they travel on the group of all ranks. On NCCL they go through
`channels`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from hetmesh.boundary.channels import Channels, job_channels
from hetmesh.boundary.transport import may_use_all_to_all
from hetmesh.cost import ModuleShape
from hetmesh.graph import ModuleGraph, ModuleSpec, StageGraph, dense_mesh, stage_graph
from hetmesh.layout import MeshSpec

Ranks = tuple[int, ...]
"""A process group: its ranks in order."""


def job_groups(
    graph: ModuleGraph, world_size: int, tied: Callable[[ModuleSpec], bool], link: str = ""
) -> tuple[Ranks, ...]:
    """All groups of several ranks of a job, besides torch's default one. Groups of equal ranks are one group, except
    for channels, of which each is one more.

    Args:
        tied: whether the first and the last stage of a module share a weight that is trained.
        link: what carries messages (`Backend.link`); empty where it is not known: as on NCCL, which needs channels.
    """
    by_order = not link or "nccl" in link
    groups: dict[Ranks, None] = {}
    for name in graph.order:
        spec = graph[name]
        for i in range(spec.mesh.axis_size("pp")):
            for mesh in stage_meshes(spec, i):
                groups |= dict.fromkeys(mesh_groups(mesh))
        if tied(spec):
            groups |= dict.fromkeys(tied_pairs(spec))
    channels = job_channels(graph) if by_order else None
    groups |= dict.fromkeys(edge_groups(stage_graph(graph), channels=channels))
    groups[tuple(range(world_size))] = None  # losses, norms and metrics
    own = () if channels is None else (channel.ranks for channel in channels.all)
    return (*(ranks for ranks in groups if len(ranks) > 1), *own)


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


def edge_groups(stages: StageGraph, transport: str = "auto", channels: Channels | None = None) -> Iterator[Ranks]:
    """The groups that edges may need: those whose transfers may be carried by an all-to-all, and have no channel."""
    for edge in stages.edges:
        if channels is not None and edge in channels.of_edge:
            continue
        ranks = tuple(sorted({*stages.ranks_of(edge.source), *stages.ranks_of(edge.destination)}))
        if may_use_all_to_all(len(ranks), transport):
            yield ranks


def groups_of_ranks(groups: Iterable[Ranks]) -> Counter[int]:
    """How many groups each rank is a member of."""
    return Counter(rank for ranks in groups for rank in ranks)


def job_communicators(
    graph: ModuleGraph, world_size: int, shape: Callable[[ModuleSpec], ModuleShape | None]
) -> dict[int, int]:
    """How many communicators each rank of a job uses: one per group, and torch's default one, which carries messages.

    Args:
        shape: the sizes of a module; None where they are not known.
    """
    counts = groups_of_ranks(job_groups(graph, world_size, lambda spec: ends_are_tied(spec, shape(spec))))
    return {rank: counts[rank] + (world_size > 1) for rank in range(world_size)}


def most_on_a_rank(groups: tuple[Ranks, ...]) -> int:
    """How many groups the rank with most of them is a member of."""
    return max(groups_of_ranks(groups).values(), default=0)
