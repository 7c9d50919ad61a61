"""How many of the LLM's microbatches each encoder pipeline on its ranks takes (Optimus, arXiv 2408.03505)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

Split = tuple[int, ...]
"""Of the microbatches of an LLM, how many each encoder pipeline on its ranks takes."""


def splits(microbatches: int, pipelines: int) -> Iterator[Split]:
    """All C(microbatches - 1, pipelines - 1) ways to give each pipeline at least one microbatch, ascending; none where
    there are fewer microbatches than pipelines."""
    for cuts in itertools.combinations(range(1, microbatches), pipelines - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, microbatches)))


def best_split(microbatches: int, pipelines: int, seconds: Callable[[Split], float], most: int) -> Split | None:
    """The split of which a step is shortest, of equal ones the first; None: none can be. As in Optimus, they are
    enumerated where they are few; of many, microbatches of an even one change pipelines for as long as that helps.

    Args:
        seconds: of a step; infinity: it cannot be.
        most: splits whose seconds are asked for.
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
