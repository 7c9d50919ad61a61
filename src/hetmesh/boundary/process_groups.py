"""The process groups of a job, as a pure function of its graph: those that axes, edges and tied weights need, no more.

A group costs every rank a connection to its members and, on NCCL, device memory on each of them. Channels are the
groups of messages on backends that match messages by order: whatever shares one waits for all that was posted before.
On gloo, which has tags, messages travel on the group of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hetmesh.boundary.transport import MEMORY, may_use_all_to_all
from hetmesh.cost import ModuleShape
from hetmesh.graph import Edge, ModuleGraph, ModuleSpec, StageGraph, dense_mesh, stage_graph
from hetmesh.layout import MeshSpec

Ranks = tuple[int, ...]
"""A process group: its ranks in order."""

MAX_EDGE_CHANNELS = 4
"""Channels of edges that a rank is a member of at most: for the stages before and after it, and two others."""

CONTEXT = "context parallelism"


@dataclass(frozen=True)
class Channel:
    """A communicator of messages.

    Attributes:
        purpose: whose messages; part of its identity, since groups of equal ranks may have different purposes.
        ranks: its members, in order.
    """

    purpose: str
    ranks: Ranks

    def __str__(self) -> str:
        return f"the messages of {self.purpose} among ranks {list(self.ranks)}"


@dataclass(frozen=True)
class Channels:
    """Those of a job.

    Attributes:
        all: in the order in which every rank makes them.
        of_edge: per forward edge; an edge that is not here uses the communicator of all ranks.
    """

    all: tuple[Channel, ...]
    of_edge: Mapping[Edge, Channel]


def job_groups(
    graph: ModuleGraph, world_size: int, tied: Callable[[ModuleSpec], bool], link: str = ""
) -> tuple[Ranks, ...]:
    """All groups of several ranks of a job, besides torch's default one. Equal ranks are one group, but for channels.

    Args:
        tied: whether the first and the last stage of a module share a weight that is trained.
        link: what carries messages (`World.link`); empty where it is not known: as on NCCL, which needs channels.
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
    groups |= dict.fromkeys(edge_groups(stage_graph(graph), link, channels))
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
    `shape`: its sizes; None for a module that cannot be built without its weights."""
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


def edge_groups(stages: StageGraph, link: str, channels: Channels | None) -> Iterator[Ranks]:
    """The groups that edges may need: those whose transfers may be carried by an all-to-all, and have no channel."""
    if link == MEMORY:
        return
    for edge in stages.edges:
        if channels is not None and edge in channels.of_edge:
            continue
        ranks = tuple(sorted({*stages.ranks_of(edge.source), *stages.ranks_of(edge.destination)}))
        if may_use_all_to_all(len(ranks)):
            yield ranks


def groups_of_ranks(groups: Iterable[Ranks]) -> Counter[int]:
    """How many groups each rank is a member of."""
    return Counter(rank for ranks in groups for rank in ranks)


def job_communicators(
    graph: ModuleGraph, world_size: int, shape: Callable[[ModuleSpec], ModuleShape | None]
) -> dict[int, int]:
    """How many communicators each rank of a job uses: one per group, and torch's default one, which carries messages.
    `shape`: the sizes of a module; None where they are not known."""
    counts = groups_of_ranks(job_groups(graph, world_size, lambda spec: ends_are_tied(spec, shape(spec))))
    return {rank: counts[rank] + (world_size > 1) for rank in range(world_size)}


def most_on_a_rank(groups: tuple[Ranks, ...]) -> int:
    """How many groups the rank with most of them is a member of."""
    return max(groups_of_ranks(groups).values(), default=0)


def context_channel(ranks: Ranks) -> Channel:
    """What carries the fetches of one context-parallel group; its ranks in the order of their coordinates."""
    return Channel(CONTEXT, ranks)


def job_channels(graph: ModuleGraph, most: int = MAX_EDGE_CHANNELS) -> Channels:
    """The channels of context-parallel groups, then those of edges.

    Gradients go back on the channel of their edge. Where a channel more would give one of its ranks more than `most`,
    an edge shares the least used one of equal ranks, and has none where there is no such one. `most`: channels of edges
    that one rank may be a member of.
    """
    context: dict[Channel, None] = {}
    for name in graph.order:
        spec = graph[name]
        meshes = [spec.stage_mesh(i) for i in range(spec.mesh.axis_size("pp"))]
        groups = [ranks for mesh in meshes if "cp" in mesh.axes for ranks in mesh.axis_groups("cp")]
        context |= dict.fromkeys(context_channel(ranks) for ranks in groups if len(ranks) > 1)
    stages = stage_graph(graph)
    edges: dict[Edge, Channel] = {}
    carried: dict[Channel, int] = {}
    on_rank: dict[int, int] = {}
    for edge in stages.edges:
        ranks = tuple(sorted({*stages.ranks_of(edge.source), *stages.ranks_of(edge.destination)}))
        if len(ranks) == 1:
            continue
        if all(on_rank.get(rank, 0) < most for rank in ranks):
            channel = Channel(str(edge), ranks)
            on_rank |= {rank: on_rank.get(rank, 0) + 1 for rank in ranks}
        else:
            shared = [known for known in carried if known.ranks == ranks]
            if not shared:
                continue
            channel = min(shared, key=lambda known: carried[known])
        edges[edge] = channel
        carried[channel] = carried.get(channel, 0) + 1
    return Channels((*context, *carried), edges)
