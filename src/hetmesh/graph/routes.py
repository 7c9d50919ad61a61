"""Routes: how many microbatches each module has in a step, and which of them feed which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetmesh.errors import ScheduleError
from hetmesh.graph.stage_graph import Edge, StageGraph
from hetmesh.layout.hashing import HashedOnce

Pairs = tuple[tuple[int, int], ...]
"""Microbatches of two modules (source, destination), ascending, each pair once."""


class Route(NamedTuple):
    """What travels along an edge from a microbatch of its source to a microbatch of its destination."""

    edge: Edge
    source: int
    destination: int

    @property
    def reversed(self) -> Route:
        """The way of the gradient."""
        return Route(self.edge.reversed, self.destination, self.source)


def microbatches_text(source: int, destination: int) -> str:
    """How names of transfers say their microbatches: `2`, or `2>3` where the number differs on both sides."""
    return str(source) if source == destination else f"{source}>{destination}"


@dataclass(frozen=True)
class Routes(HashedOnce):
    """The microbatches of a step, and which of one module feed which of another. Stages of a module keep its numbers.

    Attributes:
        counts: (module, its microbatches).
        pairs: ((source, destination), pairs of microbatches) of boundaries that join other than equal numbers.

    Raises:
        ScheduleError: a pair names a microbatch that there is not.
    """

    counts: tuple[tuple[str, int], ...]
    pairs: tuple[tuple[tuple[str, str], Pairs], ...] = ()

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        for (source, destination), pairs in self.pairs:
            limits = [self._count.get(module) for module in (source, destination)]
            for pair in pairs:
                if any(limit is None or not 0 <= m < limit for m, limit in zip(pair, limits, strict=True)):
                    raise ScheduleError(
                        f"boundary {source}->{destination}: there is no route {microbatches_text(*pair)}; microbatches "
                        f"are {limits[0]} and {limits[1]}"
                    )

    @classmethod
    def make(
        cls, counts: Mapping[str, int], pairs: Mapping[tuple[str, str], Iterable[tuple[int, int]]] | None = None
    ) -> Routes:
        """From mappings; of a boundary that joins the same numbers the pairs may be given or left out."""
        found = {}
        for (source, destination), some in (pairs or {}).items():
            each = tuple(sorted(set(some)))
            same = counts.get(source) == counts.get(destination)
            if not same or each != tuple((m, m) for m in range(counts.get(source, 0))):
                found[source, destination] = each
        return cls(tuple(counts.items()), tuple(sorted(found.items())))

    @classmethod
    def of(cls, stages: StageGraph, microbatches: Routes | int) -> Routes:
        """`microbatches` for `stages`; a number: as many in every module, and the same number on both sides.
        Raises ScheduleError: a module is missing or superfluous, or two modules have different counts and no routes."""
        modules = tuple(dict.fromkeys(stage.module for stage in stages.stages))
        if isinstance(microbatches, int):
            return cls(tuple((module, microbatches) for module in modules))
        if {module for module, _ in microbatches.counts} != set(modules):
            raise ScheduleError(f"routes are of modules {dict(microbatches.counts)}, stages of {list(modules)}")
        for edge in stages.edges:
            ends = edge.source.module, edge.destination.module
            counts = [microbatches.count(module) for module in ends]
            if ends not in microbatches._tables and counts[0] != counts[1]:
                raise ScheduleError(
                    f"boundary {ends[0]}->{ends[1]}: {counts[0]} microbatches cannot feed {counts[1]} number by number"
                )
        return microbatches

    @cached_property
    def _count(self) -> dict[str, int]:
        return dict(self.counts)

    @cached_property
    def _tables(self) -> dict[tuple[str, str], tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]:
        """Per boundary of `pairs`: by destination microbatch what feeds it, by source microbatch what it feeds."""
        tables = {}
        for (source, destination), pairs in self.pairs:
            into: list[list[int]] = [[] for _ in range(self.count(destination))]
            out_of: list[list[int]] = [[] for _ in range(self.count(source))]
            for m, to in pairs:
                into[to].append(m)
                out_of[m].append(to)
            tables[source, destination] = (list(map(tuple, into)), list(map(tuple, out_of)))
        return tables

    def count(self, module: str) -> int:
        """Microbatches of a module."""
        return self._count[module]

    @cached_property
    def most(self) -> int:
        """Microbatches of the module that has most."""
        return max((count for _, count in self.counts), default=0)

    def same_numbers(self, edge: Edge) -> bool:
        """Whether a forward edge joins the same number on both sides, and nothing else."""
        return not self.pairs or (edge.source.module, edge.destination.module) not in self._tables

    def into(self, edges: Iterable[Edge], microbatch: int) -> Iterator[Route]:
        """What feeds a microbatch: the routes of forward edges that end in it, by edge, then ascending."""
        for edge in edges:
            if self.same_numbers(edge):
                yield Route(edge, microbatch, microbatch)
            else:
                for m in self._tables[edge.source.module, edge.destination.module][0][microbatch]:
                    yield Route(edge, m, microbatch)

    def out_of(self, edges: Iterable[Edge], microbatch: int) -> Iterator[Route]:
        """What a microbatch feeds: the routes of forward edges that begin in it, by edge, then ascending."""
        for edge in edges:
            if self.same_numbers(edge):
                yield Route(edge, microbatch, microbatch)
            else:
                for m in self._tables[edge.source.module, edge.destination.module][1][microbatch]:
                    yield Route(edge, microbatch, m)

    def along(self, edge: Edge) -> Iterator[Route]:
        """All routes of a forward edge, by the microbatch of its source."""
        for m in range(self.count(edge.source.module)):
            yield from self.out_of((edge,), m)
