"""Boundaries out of an LLM, as plans of a batch have them: the hidden states of some tokens go to a generator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetmesh.balance import boundary_layouts, plan_batch
from hetmesh.balance.route_layouts import EdgeLayouts
from hetmesh.graph import BoundarySpec, LossSpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

QUERIES, FEATURES = 3, 64
"""Tokens of an item, and the width of hidden states."""


@dataclass(frozen=True)
class OutOfLlm:
    """One layout of both modules: ranks and mesh axes of each.

    Attributes:
        shared: mesh axes of the LLM along which ranks share the tokens of a lane.
        packed: its samples lie in one row.
    """

    name: str
    llm: MeshSpec
    drawer: MeshSpec
    shared: tuple[str, ...] = ()
    packed: bool = False

    def layouts(self) -> EdgeLayouts:
        """Shape and both layouts in the first microbatch of half a batch."""
        llm = ModuleSpec("llm", self.llm, features=FEATURES, token_axes=self.shared, packed=self.packed)
        drawer = ModuleSpec("drawer", self.drawer, media="drawing", loss=LossSpec("flow_matching", unit="latents"))
        boundary = BoundarySpec("llm", "drawer", "drawing", "drawing")
        graph = ModuleGraph((llm, drawer), (boundary,))
        samples = [_sample(i) for i in range(24)]
        return boundary_layouts(plan_batch(graph, samples, 12 // llm.num_lanes), boundary, 0)


def _sample(i: int) -> SampleMeta:
    """A text of 5 to 24 tokens, before and after none to two items."""
    text, items = 5 + 7 * i % 20, i % 3
    media = tuple(MediaItem("drawing", (1, 8, 8), 2 + n * QUERIES, QUERIES) for n in range(items))
    rows = {"llm.drawing": QUERIES * items, "drawer": (QUERIES + 4) * items}
    tokens = text + QUERIES * items
    return SampleMeta(str(i), tokens, media, ((tokens - 1, tokens),), rows)


def _mesh(ranks: Iterable[int], **sizes: int) -> MeshSpec:
    return MeshSpec.make(ranks, **sizes)


CASES = (
    OutOfLlm("TP4 -> disjoint DP4", _mesh(range(4), tp=4), _mesh(range(4, 8), dp_replicate=4)),
    OutOfLlm("TP4, sequence-sharded -> disjoint FSDP4", _mesh(range(4), tp=4), _mesh(range(4, 8), dp_shard=4), ("tp",)),
    OutOfLlm(
        "DP2 x TP4, sequence-sharded -> colocated DP8",
        _mesh(range(8), dp_replicate=2, tp=4),
        _mesh(range(8), dp_replicate=8),
        ("tp",),
    ),
    OutOfLlm(
        "CP4, packed -> overlapping DP4", _mesh(range(4), cp=4), _mesh(range(2, 6), dp_replicate=4), ("cp",), True
    ),
    OutOfLlm(
        "DP2 x CP2 x TP2, packed, sequence-sharded -> colocated DP4 x TP2",
        _mesh(range(8), dp_replicate=2, cp=2, tp=2),
        _mesh(range(8), dp_replicate=4, tp=2),
        ("cp", "tp"),
        True,
    ),
    OutOfLlm("FSDP4, packed -> overlapping TP4", _mesh(range(4), dp_shard=4), _mesh(range(2, 6), tp=4), (), True),
    OutOfLlm("DP4 -> permuted DP4", _mesh(range(4), dp_replicate=4), _mesh([3, 1, 0, 2], dp_replicate=4)),
)
