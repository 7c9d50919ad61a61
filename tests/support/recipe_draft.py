"""A recipe that is being drawn, and what all that draws one shares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

SINK = "llm"

Table = dict[str, Any]
"""One table of a recipe, as TOML has it."""


MESH = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)
"""Keys of the axes of a mesh, outermost first."""


@dataclass
class Draft:
    """A recipe that is being drawn: pieces read what others have chosen and add their own.

    Attributes:
        world: ranks 0 to world - 1 may be used.
        tables: the recipe's tables so far.
        layers: FQNs of the layers of each module that can be cut into pipeline stages.
        together: how many of them stay together at the beginning and at the end, where that is more than one.
        heads: of each module, what a tensor parallel degree must divide.
        shares_tokens: modules that can be context parallel; of an LLM that is none, samples stay whole.
        whole: modules that cannot split what lies between attention and MLP.
        experts, runs, gaps, generators: make the LLM a mixture of experts wherever that is possible, draw what only a
            whole run has, have encoders run in the LLM's collectives wherever they can, and modules follow the LLM,
            instead of sometimes.
    """

    world: int
    tables: Table = field(default_factory=dict)
    layers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    together: dict[str, tuple[int, int]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    shares_tokens: tuple[str, ...] = (SINK,)
    whole: tuple[str, ...] = ()
    experts: bool = False
    runs: bool = False
    gaps: bool = False
    generators: bool = False

    def table(self, *path: str) -> Table:
        """The table at `path`, made where it is missing."""
        table = self.tables
        for name in path:
            table = table.setdefault(name, {})
        return table

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules, producers before consumers."""
        return tuple(self.tables["modules"])

    @property
    def encoders(self) -> tuple[str, ...]:
        """Modules that read media."""
        fed = {boundary["to"] for boundary in self.tables.get("boundaries", ())}
        return tuple(name for name in self.modules if name != SINK and name not in fed)

    @property
    def after_llm(self) -> frozenset[str]:
        """Modules that the LLM's hidden states reach."""
        found = {SINK}
        for _ in self.modules:
            found |= {b["to"] for b in self.tables.get("boundaries", ()) if b["from"] in found}
        return frozenset(found - {SINK})

    @property
    def lanes(self) -> int:
        """Lanes of the LLM."""
        table = self.layout(SINK)
        return int(table.get("data_parallel_replicate_degree", 1) * table.get("data_parallel_shard_degree", 1))

    @property
    def drops(self) -> bool:
        """Whether a module has dropout."""
        tables = ({**module.get("lora", {}), **module.get("config", {})} for module in self.tables["modules"].values())
        return any("dropout" in each for each in tables)

    def layout(self, module: str) -> Table:
        """The layout table that holds for `module`: its own, or that of its nearest consumer that has one, or producer
        after the LLM."""
        tables, boundaries = self.tables.get("parallelism", {}), self.tables.get("boundaries", ())
        after = self.after_llm
        while module not in tables:
            outputs = [b["to"] for b in boundaries if b["from"] == module]
            if module in after:
                outputs = [b["from"] for b in boundaries if b["to"] == module and b["from"] in (SINK, *after)]
            if not outputs or module == SINK:
                return tables
            module = outputs[0]
        return tables[module]

    def degree(self, module: str, axis: str) -> int:
        """A degree of `module`, by the first word of its key: `degree("llm", "pipeline")`."""
        key = {"pipeline": "pipeline_parallel_degree", "tensor": "tensor_parallel_degree"}.get(axis)
        key = key or {"shard": "data_parallel_shard_degree", "context": "context_parallel_degree"}[axis]
        return self.layout(module).get(key, 1)

    def meets_inside(self, module: str) -> bool:
        """Whether ranks of `module` that the LLM has too meet in collectives inside it."""
        table, llm = self.layout(module), self.layout(SINK)
        keys = ("data_parallel_shard_degree", "context_parallel_degree", "tensor_parallel_degree")
        shared = set(table.get("ranks", range(self.world))) & set(llm.get("ranks", range(self.world)))
        return bool(shared) and any(table.get(key, 1) > 1 for key in keys)


Piece = Callable[[st.DrawFn, Draft], None]
"""Draws one feature."""


def lane_ranks(table: Table) -> list[set[int]]:
    """The ranks of each lane of a module with that layout table, which names its ranks."""
    pp, replicate, shard, *_ = (table.get(key, 1) for key in MESH)
    array = np.array(table["ranks"]).reshape(pp, replicate * shard, -1)
    return [set(lane.ravel().tolist()) for lane in array.swapaxes(0, 1)]


def sometimes(draw: st.DrawFn, one_in: int = 3) -> bool:
    """True once in so many draws; shrinks to False."""
    return draw(st.integers(0, one_in - 1)) == one_in - 1


def some(draw: st.DrawFn, **keys: st.SearchStrategy[Any]) -> Table:
    """Each key with a value of its strategy, or not at all."""
    return {key: draw(values) for key, values in keys.items() if draw(st.booleans())}


def wire(draft: Draft, *names: str, at: str) -> None:
    """Boundaries along `names`; the last one ends at the placeholder `at` of the LLM."""
    for source, destination in itertools.pairwise(names):
        draft.tables.setdefault("boundaries", []).append({"from": source, "to": destination})
    draft.tables["boundaries"][-1]["at"] = at


def random_media(draw: st.DrawFn, draft: Draft, kinds: Mapping[str, list[int]], **options: Any) -> None:
    """The source of random samples: some batches and lanes have no media of a kind, or none at all."""
    draft.tables["data"] = {
        "source": "hetmesh.testing.sources:RandomMedia",
        "options": {
            "kinds": dict(kinds),
            "text_only": draw(st.sampled_from([0.3, 0.0, 0.8, 1.0])),
            "max_items": draw(st.sampled_from([2, 1, 3])),
            "seed": draw(st.integers(0, 99)),
            **options,
        },
    }
