"""How evenly the experts of a recipe are used: as its own run measured, else taken to be even."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetmesh.formatting import counted
from hetmesh.graph import ModuleGraph
from hetmesh.models import Adapter


@dataclass(frozen=True)
class ExpertUse:
    """The experts of one module.

    Attributes:
        name: of the module.
        blocks, count, chosen: its blocks with experts, experts of each, experts of each token.
        ranks: along `ep`, which share them.
        tokens: of the mean expert of a block in a step.
        steps: logged steps of the run, 0 for none; `last` is the number of the last one. Without any, the rest says of
            even routing what holds for it.
        max_over_mean, last_max_over_mean: tokens of the busiest expert over the mean expert's, in the block where that
            is largest: mean of these steps, and in the last.
        without_tokens: experts that got none in the last step, of all blocks.
    """

    name: str
    blocks: int
    count: int
    chosen: int
    ranks: int
    tokens: float
    steps: int = 0
    last: int = 0
    max_over_mean: float = 1.0
    last_max_over_mean: float = 1.0
    without_tokens: int = 0

    def as_text(self) -> Iterator[str]:
        """Two lines."""
        yield (
            f"experts of {self.name}: {counted(self.blocks, 'block')} of {self.count}, of which a token has "
            f"{self.chosen}, over {counted(self.ranks, 'rank')}; {self.tokens:,.1f} tokens per expert and step"
        )
        if not self.steps:
            yield "  not measured by a run of this recipe: routing, which depends on weights, is taken to be even"
            return
        yield (
            f"  max / mean tokens of an expert, as its run measured: {self.max_over_mean:.2f} over "
            f"{counted(self.steps, 'logged step')}, {self.last_max_over_mean:.2f} in step {self.last}, where "
            f"{counted(self.without_tokens, 'expert')} got none"
        )


def expert_use(
    graph: ModuleGraph, adapters: Mapping[str, Adapter], tokens: float, records: Iterable[Mapping[str, Any]]
) -> tuple[ExpertUse, ...]:
    """Of every module whose experts ranks can share.

    Args:
        tokens: of a step in the LLM.
        records: lines of the run's metrics.jsonl; those without `experts` are passed over.
    """
    logged = [record for record in records if record.get("experts")]
    found = []
    for name, adapter in adapters.items():
        if (own := adapter.abilities.experts) is None:
            continue
        sizes = len(own.blocks), own.count, own.chosen, graph[name].mesh.axis_size("ep")
        measured = [(record["step"], record["experts"][name]) for record in logged if name in record["experts"]]
        spread = [load["max_over_mean"] for _, load in measured]
        use = ExpertUse(name, *sizes, tokens * own.chosen / own.count)
        if measured:
            last, load = measured[-1]
            mean = sum(spread) / len(spread)
            use = ExpertUse(
                name, *sizes, use.tokens, len(measured), last, mean, spread[-1], int(load["without_tokens"])
            )
        found.append(use)
    return tuple(found)
