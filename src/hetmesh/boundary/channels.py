"""Channels: the communicators of messages, as a pure function of the graph; for backends that match messages by order.

One communicator is one queue: whatever shares it waits for all that was posted before. So the fetches of each
context-parallel group have a channel of their own, and so has each edge, up to a number per rank: a communicator that
is used costs device memory on each of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetmesh.graph import Edge, ModuleGraph, stage_graph

MOST_OF_EDGES = 4
"""Channels of edges that a rank is a member of at most: for a stage before it, one behind it, and two others."""

CONTEXT = "context parallelism"


@dataclass(frozen=True)
class Channel:
    """A communicator of messages.

    Attributes:
        purpose: whose messages; part of its identity, since groups of equal ranks may have different purposes.
        ranks: its members, in order.
    """

    purpose: str
    ranks: tuple[int, ...]

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


def context_channel(ranks: tuple[int, ...]) -> Channel:
    """What carries the fetches of one context-parallel group; its ranks in the order of their coordinates."""
    return Channel(CONTEXT, ranks)


def job_channels(graph: ModuleGraph, most: int = MOST_OF_EDGES) -> Channels:
    """The channels of context-parallel groups, then those of edges.

    Gradients go back on the channel of their edge. Where a channel more would give one of its ranks more than `most`,
    an edge shares the least used one of equal ranks, and has none where there is no such one.

    Args:
        most: channels of edges that one rank may be a member of.
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
