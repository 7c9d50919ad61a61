"""Plans of an encoder on the ranks of an LLM's pipeline, as Optimus searches them (arXiv 2408.03505, section 4.1).

Which degrees go together is what the planner says (`suits`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetmesh.planner import ModulePlan
from hetmesh.planner.candidates import suits


@dataclass(frozen=True, order=True)
class EncoderPlan:
    """How an encoder lies on the ranks of one replica of the LLM.

    Attributes:
        pp, tp: its degrees; they divide the LLM's.
        lanes: its pipelines: what is left of the ranks.
        microbatch: samples of each pipeline at a time.
        virtual: stages per rank of a pipeline, which take turns on its ranks as those of an interleaved LLM do. The
            first microbatches then come faster one after the other, and their stages exchange as many more messages.
    """

    pp: int
    tp: int
    lanes: int
    microbatch: int
    virtual: int = 1


def encoder_plans(pp: int, tp: int, samples: int, largest: int, layers: int, virtual: int = 1) -> Iterator[EncoderPlan]:
    """Every plan whose pipelines share the samples of a step evenly, in whole microbatches.

    The samples go round: pipeline j takes the j-th share of each of the encoder's microbatches. Uneven ways to part
    them, because pipelines on other stages of the LLM have other gaps, are splits of whole
    microbatches (`hetmesh.planner.microbatch_splits.splits`).

    Args:
        pp, tp: degrees of the LLM.
        samples: of one replica in a step.
        largest: most samples of a microbatch.
        layers: of the encoder; stages hold equally many.
        virtual: most stages per rank of a pipeline.
    """
    llm = ModulePlan((0, pp * tp), (pp, 1, 1, 1, tp))
    for own_pp in _divisors(layers):
        for own_tp in range(1, tp + 1):
            lanes = pp * tp // (own_pp * own_tp)
            if not suits(ModulePlan(llm.ranks, (own_pp, lanes, 1, 1, own_tp)), llm):
                continue
            for size in range(1, largest + 1):
                if samples % (lanes * size):
                    continue
                for turns in _divisors(layers // own_pp) if own_pp > 1 else (1,):
                    if turns <= virtual:
                        yield EncoderPlan(own_pp, own_tp, lanes, size, turns)


def _divisors(n: int) -> Iterator[int]:
    return (d for d in range(1, n + 1) if n % d == 0)
