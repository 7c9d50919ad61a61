"""Plans of an encoder on the ranks of an LLM's pipeline, as Optimus searches them (arXiv 2408.03505, section 4.1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Split = tuple[int, ...]
"""Of the microbatches of an LLM, how many each encoder pipeline on its ranks takes."""


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
    them, because pipelines on other stages of the LLM have other gaps, are `splits` of whole microbatches.

    Args:
        pp, tp: degrees of the LLM.
        samples: of one replica in a step.
        largest: most samples of a microbatch.
        layers: of the encoder; stages hold equally many.
        virtual: most stages per rank of a pipeline.
    """
    for own_pp in _divisors(pp):
        if layers % own_pp:
            continue
        for own_tp in _divisors(tp):
            lanes = pp * tp // (own_pp * own_tp)
            for size in range(1, largest + 1):
                if samples % (lanes * size):
                    continue
                for turns in _divisors(layers // own_pp) if own_pp > 1 else (1,):
                    if turns <= virtual:
                        yield EncoderPlan(own_pp, own_tp, lanes, size, turns)


def splits(microbatches: int, pipelines: int) -> Iterator[Split]:
    """All C(microbatches - 1, pipelines - 1) ways to give each pipeline at least one microbatch, ascending; none where
    there are fewer microbatches than pipelines."""
    for cuts in itertools.combinations(range(1, microbatches), pipelines - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, microbatches)))


def best_split(microbatches: int, pipelines: int, seconds: Callable[[Split], float], most: int) -> Split | None:
    """The split of which a step is shortest; of equal ones the first. As in Optimus, they are enumerated where they are
    few; of many, single microbatches of an even one are moved to other pipelines for as long as that helps.

    Args:
        seconds: of a step; infinity: it cannot be.
        most: splits whose seconds are asked for.

    Returns:
        None: none can be.
    """
    known: dict[Split, float] = {}

    def found() -> Split | None:
        best = min(known, key=known.__getitem__, default=None)
        return None if best is None or known[best] == math.inf else best

    if microbatches < pipelines or most < 1:
        return None
    if math.comb(microbatches - 1, pipelines - 1) <= most:
        known = {split: seconds(split) for split in splits(microbatches, pipelines)}
        return found()
    each, more = divmod(microbatches, pipelines)
    best = tuple(each + (j < more) for j in range(pipelines))
    known[best] = seconds(best)
    moves = list(itertools.permutations(range(pipelines), 2))
    tried, at = 0, 0
    while tried < len(moves) and len(known) < most:
        source, target = moves[at]
        moved = tuple(n - (j == source) + (j == target) for j, n in enumerate(best))
        if moved[source] and moved not in known:
            known[moved] = seconds(moved)
            if known[moved] < known[best]:
                best, tried = moved, -1
        if tried >= 0:  # a move that helped is tried again
            at = (at + 1) % len(moves)
        tried += 1
    return found()


def _divisors(n: int) -> Iterator[int]:
    return (d for d in range(1, n + 1) if n % d == 0)
