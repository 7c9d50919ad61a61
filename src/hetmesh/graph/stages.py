"""Stages: contiguous runs of a module's layers. The nodes of what a schedule runs; edges carry boundary rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hetmesh.graph.module_graph import ModuleGraph


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Run `index` of the layers of `module`; 0 where the module is not split."""

    module: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.module}.{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """What one stage sends to another. Rows go from producer to consumer, their gradients along the reversed edge."""

    source: Stage
    destination: Stage

    @property
    def reversed(self) -> Edge:
        """The edge that carries the gradient back."""
        return Edge(self.destination, self.source)

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"


@dataclass(frozen=True)
class StageGraph:
    """The DAG of stages.

    Attributes:
        stages: in execution order, producers before consumers.
        edges: forward edges, in the order of the graph's boundaries.
        backward_stages: stages with a backward (something trainable in or before them).
        gradient_edges: forward edges through which a gradient flows back.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    backward_stages: frozenset[Stage]
    gradient_edges: frozenset[Edge]

    def inputs(self, stage: Stage) -> tuple[Edge, ...]:
        """Forward edges into `stage`."""
        return tuple(e for e in self.edges if e.destination == stage)

    def outputs(self, stage: Stage) -> tuple[Edge, ...]:
        """Forward edges out of `stage`."""
        return tuple(e for e in self.edges if e.source == stage)

    @cached_property
    def sink(self) -> Stage:
        """The stage that computes the loss."""
        return self.stages[-1]


def stage_graph(graph: ModuleGraph) -> StageGraph:
    """One stage per module. (Modules with a `pp` axis are not split yet: recipes refuse it.)"""
    stages = {name: Stage(name) for name in graph.order}
    edges = {b: Edge(stages[b.source], stages[b.destination]) for b in graph.boundaries}
    return StageGraph(
        tuple(stages.values()),
        tuple(edges.values()),
        frozenset(stages[name] for name in graph.order if graph.backward_reaches(name)),
        frozenset(edge for b, edge in edges.items() if graph.needs_gradient(b)),
    )
