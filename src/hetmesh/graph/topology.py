"""Topology: the names of modules and who feeds whom. What a graph is before anything is known about its modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hetmesh.errors import GraphError


@dataclass(frozen=True)
class BoundarySpec:
    """An edge of the graph: rows of `source` go to `destination`.

    Attributes:
        at: the placeholder whose tokens the rows replace; None where the destination consumes rows as such.
        output: which output of the source it carries: `""` is the rows, others have names (`"deepstack.0"`). All have
            one row for each of the rows, of the same width.
        layer: the layer of the destination that an output with a name goes to: it is added to the tokens after it.
    """

    source: str
    destination: str
    at: str | None = None
    output: str = ""
    layer: str | None = None

    @property
    def name(self) -> str:
        """How logs and errors call it: `"vision->projector"`, `"vision.deepstack.0->llm"`."""
        return f"{self.key}->{self.destination}"

    @property
    def key(self) -> str:
        """What the destination knows its rows by among its inputs."""
        return output_key(self.source, self.output)


def output_key(module: str, output: str = "") -> str:
    """What consumers know an output of a module by: the module's name for its rows, `vision.deepstack.0` for others."""
    return f"{module}.{output}" if output else module


@dataclass(frozen=True)
class Topology:
    """A DAG of module names with one llm (the module that computes the loss). Raises GraphError: unknown or repeated
    names, a cycle, or not exactly one llm."""

    names: tuple[str, ...]
    boundaries: tuple[BoundarySpec, ...] = ()

    def __post_init__(self) -> None:
        names = list(self.names)
        if len(set(names)) != len(names):
            raise GraphError(f"modules must have distinct names: {names}")
        for b in self.boundaries:
            for end in (b.source, b.destination):
                if end not in names:
                    raise GraphError(f"boundary {b.name}: there is no module {end!r}; modules are {names}")
        ends = [b.name for b in self.boundaries]
        if len(set(ends)) != len(ends):
            raise GraphError(f"at most one boundary per output between two modules: {ends}")
        sinks = [n for n in names if all(b.source != n for b in self.boundaries)]
        if len(sinks) != 1:
            raise GraphError(
                f"exactly one module may have no consumer, the LLM, got {sinks}; modules after it and a second llm "
                "are not supported"
            )
        if len(self.order) != len(names):
            raise GraphError(f"boundaries form a cycle among {sorted(set(names) - set(self.order))}")

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Module names, producers before consumers; ties in the order given."""
        done: list[str] = []
        pending = list(self.names)
        while ready := [n for n in pending if all(b.source in done for b in self.inputs(n))]:
            done.append(ready[0])
            pending.remove(ready[0])
        return tuple(done)

    @property
    def llm(self) -> str:
        """The module that computes the loss."""
        return self.order[-1]

    def inputs(self, name: str) -> tuple[BoundarySpec, ...]:
        """Boundaries into module `name`, in the order given."""
        return tuple(b for b in self.boundaries if b.destination == name)

    def outputs(self, name: str) -> tuple[BoundarySpec, ...]:
        """Boundaries out of module `name`, in the order given."""
        return tuple(b for b in self.boundaries if b.source == name)

    def placeholders(self, name: str) -> tuple[str, ...]:
        """The placeholders that rows of module `name` replace, directly or through others, in the order given."""
        found: list[str] = []
        for b in self.outputs(name):
            found += self.placeholders(b.destination) if b.at is None else [b.at]
        return tuple(dict.fromkeys(found))

    def upstream(self, name: str) -> frozenset[str]:
        """The modules whose rows reach module `name`, directly or not."""
        sources = {b.source for b in self.inputs(name)}
        return frozenset(sources).union(*map(self.upstream, sources))
