"""Topology: the names of modules and who feeds whom. What a graph is before anything is known about its modules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from hetmesh.errors import GraphError


@dataclass(frozen=True)
class BoundarySpec:
    """An edge of the graph: rows of `source` go to `destination`.

    Attributes:
        at: into the LLM: the placeholder whose tokens the rows replace. Out of it: the placeholder whose tokens' hidden
            states are the rows. None where the destination consumes rows as such.
        output: which output of the source it carries: `""` is the rows, others have names (`"deepstack.0"`). All have
            one row for each of the rows, of the same width. Out of the LLM: the placeholder, `at`.
        layer: into the LLM: the layer that an output with a name goes to: it is added to the tokens after it. Out of
            the LLM: the layer whose output the hidden states are; None: what its head reads.
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
    """A DAG of module names. Raises GraphError: unknown or repeated names, a cycle, or several modules that could be
    the LLM.

    Attributes:
        others: the modules that have a loss which does not count tokens: none of them is the LLM.
    """

    names: tuple[str, ...]
    boundaries: tuple[BoundarySpec, ...] = ()
    others: frozenset[str] = frozenset()

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
        if len(self.order) != len(names):
            raise GraphError(f"boundaries form a cycle among {sorted(set(names) - set(self.order))}")
        if self.llm not in names:
            raise GraphError(
                f"exactly one module may have no consumer and no loss of another unit than tokens, the LLM, got "
                f"{list(self._ends)}; every other module without consumers needs a [modules.<name>.loss]"
            )

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Module names, producers before consumers; ties in the order given."""
        done: list[str] = []
        pending = list(self.names)
        while ready := [n for n in pending if all(b.source in done for b in self.inputs(n))]:
            done.append(ready[0])
            pending.remove(ready[0])
        return tuple(done)

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The modules without consumers that may be the LLM."""
        return tuple(name for name in self.names if not self.outputs(name) and name not in self.others)

    @cached_property
    def llm(self) -> str:
        """The module that reads tokens: the one that rows with `at` go to, or come from. In a graph without any, the
        one without consumers, or the first of several where all are `others`. Empty: there is no such one.

        Where graphs are wrong, it is who most of these `at` speak of, so that errors name what is out of place.
        """
        placed = [b for b in self.boundaries if b.at is not None]
        ends = Counter(end for b in placed for end in (b.source, b.destination))
        if most := [name for name in self.order if ends[name] == max(ends.values(), default=-1)]:
            first, last = most[0], most[:2][-1]  # two: all rows with `at` go from one to the other
            fed = any(b.at is None for b in self.inputs(first))
            return last if last in self._ends or (fed and self.outputs(last)) else first
        if self._ends:
            return self._ends[0] if len(self._ends) == 1 else ""
        return next((name for name in self.names if not self.outputs(name)), "")

    @cached_property
    def after_llm(self) -> frozenset[str]:
        """The modules that rows of the LLM reach, directly or not."""
        return frozenset(name for name in self.names if self.llm in self.upstream(name))

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

    def generated(self, name: str) -> str | None:
        """The placeholder whose hidden states reach module `name`, directly or through others; None: those of none."""
        for b in self.inputs(name):
            if (at := b.at if b.source == self.llm else self.generated(b.source)) is not None:
                return at
        return None

    def neighbour(self, name: str) -> str | None:
        """Whose mesh a module takes that has none of its own: its first consumer's; after the LLM that of the first of
        those that feed it that is the LLM or after it. None: the LLM takes nobody's, nor does one that nobody reads."""
        if name in self.after_llm:
            sources = (b.source for b in self.inputs(name))
            return next(source for source in sources if source == self.llm or source in self.after_llm)
        return None if name == self.llm else next((b.destination for b in self.outputs(name)), None)

    def upstream(self, name: str) -> frozenset[str]:
        """The modules whose rows reach module `name`, directly or not."""
        sources = {b.source for b in self.inputs(name)}
        return frozenset(sources).union(*map(self.upstream, sources))
