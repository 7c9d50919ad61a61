"""Stages: contiguous runs of a module's layers. The nodes of what a schedule runs; edges carry rows or activations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from hetmesh.graph.module_graph import ModuleGraph
from hetmesh.graph.topology import BoundarySpec, output_key
from hetmesh.layout.hashing import HashedOnce


@dataclass(frozen=True, order=True)
class Stage(HashedOnce):
    """Run `index` of the layers of `module`; 0 where the module is not split."""

    module: str
    index: int = 0

    __hash__ = HashedOnce.__hash__

    def __str__(self) -> str:
        return f"{self.module}.{self.index}"


@dataclass(frozen=True, order=True)
class Edge(HashedOnce):
    """What one stage sends to another. Rows go from producer to consumer, their gradients along the reversed edge.
    `output`: which output of the producer it carries; see `BoundarySpec`."""

    source: Stage
    destination: Stage
    output: str = ""

    __hash__ = HashedOnce.__hash__

    @cached_property
    def reversed(self) -> Edge:
        """The edge that carries the gradient back."""
        return Edge(self.destination, self.source, self.output)

    @property
    def internal(self) -> bool:
        """Whether it joins two stages of one module, and so carries activations."""
        return self.source.module == self.destination.module

    @property
    def key(self) -> str:
        """What the consumer of a forward edge between modules knows its rows by."""
        return output_key(self.source.module, self.output)

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}" + (f" ({self.output})" if self.output else "")


@dataclass(frozen=True)
class StageGraph:
    """The DAG of stages.

    Attributes:
        stages: in execution order, producers before consumers.
        edges: forward edges: those of the graph's boundaries in their order, then those between stages of a module.
        backward_stages: stages with a backward (something trainable in or before them).
        gradient_edges: forward edges through which a gradient flows back.
        trainable_stages: stages with a trainable parameter: those whose gradients are reduced.
        ranks: of each stage, ascending; equally many for all stages of a module.
        splittable_stages: stages whose backward may come in two parts: both the gradient of an input and those of
            parameters are wanted, and it can be split.
        llm_name: the module that reads tokens.
        losses: the stages that compute a loss.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    backward_stages: frozenset[Stage]
    gradient_edges: frozenset[Edge]
    trainable_stages: frozenset[Stage]
    ranks: tuple[tuple[int, ...], ...]
    splittable_stages: frozenset[Stage]
    llm_name: str
    losses: frozenset[Stage]

    @cached_property
    def _inputs(self) -> dict[Stage, tuple[Edge, ...]]:
        return {s: tuple(e for e in self.edges if e.destination == s) for s in self.stages}

    @cached_property
    def _outputs(self) -> dict[Stage, tuple[Edge, ...]]:
        return {s: tuple(e for e in self.edges if e.source == s) for s in self.stages}

    @cached_property
    def _gradient_outputs(self) -> dict[Stage, tuple[Edge, ...]]:
        return {s: tuple(e for e in some if e in self.gradient_edges) for s, some in self._outputs.items()}

    @cached_property
    def _ranks(self) -> dict[Stage, tuple[int, ...]]:
        return dict(zip(self.stages, self.ranks, strict=True))

    def inputs(self, stage: Stage) -> tuple[Edge, ...]:
        return self._inputs[stage]

    def outputs(self, stage: Stage) -> tuple[Edge, ...]:
        return self._outputs[stage]

    def gradient_outputs(self, stage: Stage) -> tuple[Edge, ...]:
        """Forward edges out of `stage` through which a gradient comes back."""
        return self._gradient_outputs[stage]

    def ranks_of(self, stage: Stage) -> tuple[int, ...]:
        """The ranks that hold `stage`, ascending."""
        return self._ranks[stage]

    def rank_classes(
        self, sets: Mapping[Stage, Sequence[Sequence[int]]] = MappingProxyType({})
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(ranks, the stages, by index, that each of them holds): ranks that hold the same, and of each stage the same
        of its `sets` of ranks, are together, lowest first."""
        held: dict[int, list[tuple[int, int]]] = {}
        for i, stage in enumerate(self.stages):
            for g, own in enumerate(sets.get(stage, (self.ranks[i],))):
                for rank in own:
                    held.setdefault(rank, []).append((i, g))
        classes: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in sorted(held):
            classes.setdefault(tuple(held[rank]), []).append(rank)
        return [(tuple(ranks), tuple(i for i, _ in stages_and_sets)) for stages_and_sets, ranks in classes.items()]

    @cached_property
    def llm(self) -> Stage:
        """The last stage of the module that reads tokens."""
        return self.of_module(self.llm_name)[-1]

    @cached_property
    def after_llm(self) -> frozenset[Stage]:
        """The stages that rows of the LLM reach."""
        found: set[Stage] = set()
        for stage in self.stages:
            sources = {edge.source for edge in self.inputs(stage) if not edge.internal or edge.source in found}
            if any(source.module == self.llm.module or source in found for source in sources):
                found.add(stage)
        return frozenset(found)

    def of_module(self, name: str) -> tuple[Stage, ...]:
        """The stages of one module, in order."""
        return tuple(stage for stage in self.stages if stage.module == name)


def boundary_edge(graph: ModuleGraph, boundary: BoundarySpec) -> Edge:
    """The edge of a boundary: from its source's last stage to its destination's first, or to the one with its layer;
    out of the LLM from the one with its layer."""
    source = Stage(boundary.source, graph.source_stage(boundary))
    return Edge(source, Stage(boundary.destination, graph.destination_stage(boundary)), boundary.output)


def stage_graph(graph: ModuleGraph) -> StageGraph:
    """The stages of all modules, as their `splits` say."""
    stages = [Stage(name, i) for name in graph.order for i in range(graph[name].num_stages)]
    edges = [boundary_edge(graph, b) for b in graph.boundaries]
    edges += [Edge(a, b) for a, b in itertools.pairwise(stages) if a.module == b.module]
    trainable = {s for s in stages if graph[s.module].trainable and not _frozen(graph, s)}
    reached: set[Stage] = set()
    for stage in stages:
        if stage in trainable or any(e.source in reached for e in edges if e.destination == stage):
            reached.add(stage)
    gradient_edges = frozenset(edge for edge in edges if edge.source in reached)
    ranks = tuple(tuple(sorted(graph[s.module].stage_mesh(s.index).ranks)) for s in stages)
    wanted = trainable & {edge.destination for edge in gradient_edges}
    splittable = frozenset(stage for stage in wanted if graph[stage.module].splits_backward)
    sets = frozenset(reached), gradient_edges, frozenset(trainable)
    losses = frozenset(Stage(name, graph[name].num_stages - 1) for name in graph.losses)
    return StageGraph(tuple(stages), tuple(edges), *sets, ranks, splittable, graph.llm.name, losses)


def _frozen(graph: ModuleGraph, stage: Stage) -> bool:
    layers = graph[stage.module].stage_layers(stage.index)
    return bool(layers) and set(layers) <= graph[stage.module].frozen_layers
