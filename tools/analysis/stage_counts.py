"""How many pipeline stages each module gets, when all of them share a number of ranks.

Cornstarch (arXiv 2503.11367, section 4): modules are chains of layers in a DAG, each cut into stages of its own; one
step takes about T = (microbatches - 1) x slowest stage + the longest path of one microbatch through all stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetmesh.cost import LayerTime
from hetmesh.cost.stage_cuts import partition, runs
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph


@dataclass(frozen=True)
class Chain:
    """The layers of one module, as far as cutting it goes.

    Attributes:
        forward, backward: seconds of each layer in one microbatch. Backward as the layer is trained and fed: 0 for a
            frozen encoder (`hetmesh.cost.layer_time`).
        ranks: of one stage.
        follows: shares the ranks of another module's stage instead of having its own, as a projector does that goes
            with its consumer: the name of that module. It is not cut, and its time counts to that module's first stage.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    ranks: int = 1
    follows: str | None = None

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Seconds of each layer."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def blind(self) -> Chain:
        """With a backward of twice the forward everywhere: what is seen without looking at what is frozen."""
        return Chain(self.forward, tuple(2 * f for f in self.forward), self.ranks, self.follows)


@dataclass(frozen=True)
class StageCounts:
    """Where to cut each module.

    Attributes:
        layers: per module that has ranks of its own, how many layers each of its stages takes.
        slowest: seconds of the slowest stage, forward and backward.
        critical: seconds of one microbatch along the longest path, forward and backward.
        seconds: T of the step.
    """

    layers: Mapping[str, tuple[int, ...]]
    slowest: float
    critical: float
    seconds: float


def stage_counts(graph: ModuleGraph, chains: Mapping[str, Chain], ranks: int, microbatches: int) -> StageCounts:
    """The stage counts and cuts with the least T whose stages take all `ranks` of a replica.

    Of equal ones, the modules that come first in `graph.order` get fewer stages. Exact: every way to hand out the ranks
    is tried, each with the exact cut (`partition`).

    Raises:
        GraphError: no way takes exactly `ranks` ranks.
    """
    names = [name for name in graph.order if chains[name].follows is None]
    best: StageCounts | None = None
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for counts in _shares([chains[n].ranks for n in names], [len(chains[n].costs) for n in names], ranks):
        cuts = {}
        for name, count in zip(names, counts, strict=True):
            if (name, count) not in found:
                found[name, count] = partition(_costs(chains, name), count)
            cuts[name] = found[name, count]
        score = time_of_cuts(graph, chains, cuts, microbatches)
        if best is None or score.seconds < best.seconds * (1 - 1e-12):
            best = score
    if best is None:
        each = {name: f"{len(chains[name].costs)} layers, {chains[name].ranks} ranks per stage" for name in names}
        raise GraphError(f"{ranks} ranks for the stages of {each}: no way takes exactly that many")
    return best


def time_of_cuts(
    graph: ModuleGraph, chains: Mapping[str, Chain], cuts: Mapping[str, Sequence[int]], microbatches: int
) -> StageCounts:
    """T of given cuts, by the costs of `chains`."""
    each = {name: [float(sum(run)) for run in runs(_costs(chains, name), cut)] for name, cut in cuts.items()}
    slowest = max(max(costs) for costs in each.values())
    totals = {name: sum(chain.costs) for name, chain in chains.items()}
    longest: dict[str, float] = {}
    for name in graph.order:
        before = max((longest[b.source] for b in graph.inputs(name)), default=0.0)
        longest[name] = before + totals[name]
    critical = longest[graph.llm.name]
    layers = {name: tuple(cut) for name, cut in cuts.items()}
    return StageCounts(layers, slowest, critical, (microbatches - 1) * slowest + critical)


def _costs(chains: Mapping[str, Chain], name: str) -> tuple[float, ...]:
    """Of a module's layers, with those of the modules that share the ranks of its first stage on the first layer."""
    first, *rest = chains[name].costs
    return (first + sum(sum(c.costs) for c in chains.values() if c.follows == name), *rest)


def _shares(sizes: Sequence[int], most: Sequence[int], ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `ranks` ranks to modules whose stages take `sizes` of them, at least one stage each."""
    *others, last = range(len(sizes))
    limits = [range(1, min(most[i], ranks // sizes[i]) + 1) for i in others]
    for counts in itertools.product(*limits):
        left = ranks - sum(n * sizes[i] for n, i in zip(counts, others, strict=True))
        if left > 0 and left % sizes[last] == 0 and left // sizes[last] <= most[last]:
            yield (*counts, left // sizes[last])


def frozen_blind(time: LayerTime) -> LayerTime:
    """What a partitioner assumes that does not look at what is frozen: a backward of twice the forward."""
    return LayerTime(time.forward, time.forward, time.forward)
