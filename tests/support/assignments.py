"""Policies for the parity harness: samples anywhere, to see that a run does not depend on where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hetmesh.balance import BatchPlan, Lanes
from hetmesh.graph import ModuleGraph, SampleMeta


@dataclass(frozen=True)
class RandomAssignment:
    """Every module by itself gets a number of microbatches, and each sample a lane and microbatch, at random; the same
    on every rank, and another one for every batch.

    Attributes:
        seed: of it all.
        most: microbatches of a module; 1 to so many.
    """

    seed: int
    most: int = 5

    def __call__(self, graph: ModuleGraph, samples: Sequence[SampleMeta], microbatch_size: int) -> BatchPlan:
        """A `Policy`; the size of microbatches does not matter to it."""
        random = Random("/".join([str(self.seed), *(sample.id for sample in samples)]))
        lanes = {name: self._assign(random, len(samples), graph[name].num_lanes) for name in graph.order}
        return BatchPlan(graph, tuple(samples), lanes)

    def _assign(self, random: Random, samples: int, lanes: int) -> tuple[Lanes, ...]:
        count = random.randint(1, self.most)
        found: list[list[list[int]]] = [[[] for _ in range(lanes)] for _ in range(count)]
        for i in random.sample(range(samples), samples):
            random.choice(random.choice(found)).append(i)
        return tuple(tuple(map(tuple, each)) for each in found)


@dataclass(frozen=True)
class Deferred:
    """The latter half of a microbatch goes through the LLM one microbatch later than through the modules before it:
    the shape of Entrain's deferral (arXiv 2605.27918).

    Attributes:
        size: samples per microbatch of the modules before the LLM, over all lanes.
        split: give the modules before the LLM two microbatches in place of one, what is kept and what is deferred, so
            that each has a backward of its own; otherwise their backward waits for both.
    """

    size: int
    split: bool = False

    def __call__(self, graph: ModuleGraph, samples: Sequence[SampleMeta], microbatch_size: int) -> BatchPlan:
        """A `Policy`; the recipe's size of microbatches does not matter to it."""
        starts = range(0, max(len(samples), 1), self.size)
        slots = [list(range(i, min(i + self.size, len(samples)))) for i in starts]
        halves = [(slot[: (len(slot) + 1) // 2], slot[(len(slot) + 1) // 2 :]) for slot in slots]
        last = len(slots) - 1
        halves[last] = (slots[last], [])
        before = [half for pair in halves for half in pair] if self.split else slots
        llm = [kept + (halves[m - 1][1] if m else []) for m, (kept, _) in enumerate(halves)]
        lanes = {
            name: tuple(_deal(some, graph[name].num_lanes) for some in (llm if name == graph.llm.name else before))
            for name in graph.order
        }
        return BatchPlan(graph, tuple(samples), lanes)


def _deal(samples: Sequence[int], lanes: int) -> Lanes:
    return tuple(tuple(samples[lane::lanes]) for lane in range(lanes))
