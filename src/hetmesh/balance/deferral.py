"""Deferral: the last module takes some samples one microbatch late, so that its microbatches become equal.

Entrain (arXiv 2605.27918): microbatches with more than the median of LLM work are overloaded, the others underloaded.
Each overloaded one gets an underloaded partner that comes right after it, and hands it the samples whose work is
nearest to half the difference (subset sum); bottleneck matching chooses the partners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def bottleneck_matching(cost: np.ndarray) -> list[int]:
    """The partner of each row of `cost` `[n, n]`: a perfect matching whose largest cost is as small as possible.

    Binary search over the costs that occur; for each, whether the pairs that cost no more hold a perfect matching, by
    augmenting paths (Kuhn). As in Entrain (arXiv 2605.27918).
    """
    if not len(cost):
        return []
    least = max(cost.min(0).max(), cost.min(1).max())  # every row and every column needs a partner
    values = np.unique(cost[cost >= least])
    best = _perfect(cost, values[0])  # enough, nearly always
    if best is not None:
        return best
    low, high = 1, len(values) - 1  # the largest always suffices
    while low < high:
        middle = (low + high) // 2
        if _perfect(cost, values[middle]) is None:
            low = middle + 1
        else:
            high = middle
    best = _perfect(cost, values[low])
    assert best is not None, "all pairs together hold a perfect matching"
    return best


def _perfect(cost: np.ndarray, limit: float) -> list[int] | None:
    """A perfect matching of pairs that cost at most `limit`; cheap partners are tried first."""
    size = len(cost)
    order = np.argsort(cost, axis=1, kind="stable")
    allowed = (cost <= limit).sum(1).tolist()
    partners = [row[:count] for row, count in zip(order.tolist(), allowed, strict=True)]
    row_of = [-1] * size

    def augment(row: int, seen: list[bool]) -> bool:
        for column in partners[row]:
            if not seen[column]:
                seen[column] = True
                if row_of[column] < 0 or augment(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    for row in range(size):
        if not augment(row, [False] * size):
            return None
    out = [0] * size
    for column, row in enumerate(row_of):
        out[row] = column
    return out


MAX_MOVABLE_SAMPLES = 8  # of one microbatch, among which a subset is sought (256 sums): its heaviest and lightest
FORBIDDEN_LOAD = 1 << 55  # that no microbatch has; times MAX_MOVABLE_SAMPLES it is still a whole number of 64 bits


@dataclass(frozen=True)
class Pairing:
    """What one lane defers.

    Attributes:
        order: its microbatches: an overloaded one, the underloaded one that takes from it, the next two, and so on; one
            without a partner comes last.
        deferred: the samples that the last module takes one place later than the order says.
    """

    order: tuple[int, ...]
    deferred: tuple[int, ...]


def defer(
    members: Sequence[Sequence[int]], work: np.ndarray, tokens: np.ndarray | None = None, cap: int | None = None
) -> Pairing:
    """Pair the microbatches of one lane and choose what is deferred.

    Args:
        members: the samples of each microbatch.
        work: int64 `[samples]`: of the last module.
        tokens: int64 `[samples]`; with `cap`, what a microbatch may hold of them after it took over others.
    """
    half = len(members) // 2
    loads = np.array([int(work[list(m)].sum()) for m in members], np.int64)
    heaviest = np.argsort(-loads, kind="stable")
    over, under = heaviest[:half], heaviest[len(members) - half :]
    alone = heaviest[half : len(members) - half].tolist()
    if not half:
        return Pairing(tuple(alone), ())
    movable = [_movable(members[o], work) for o in over.tolist()]
    width = max(map(len, movable))
    table = np.array([samples + [-1] * (width - len(samples)) for samples in movable], np.int64).reshape(half, width)
    real = table >= 0
    sums = _subset_sums(np.where(real, work[table], 0))
    after = np.maximum(loads[over][:, None, None] - sums[:, None], loads[under][None, :, None] + sums[:, None])
    if tokens is not None and cap is not None:
        held = np.array([int(tokens[list(members[u])].sum()) for u in under.tolist()])
        moved = _subset_sums(np.where(real, tokens[table], 0))
        fits = (held[None, :, None] + moved[:, None] <= cap) | (moved == 0)[:, None]
        after = np.where(fits, after, FORBIDDEN_LOAD)
    # Of equally good handovers the one that moves fewest samples.
    best = (after * (MAX_MOVABLE_SAMPLES + 1) + _subset_sums(real.astype(np.int64))[:, None]).argmin(2)
    partner = bottleneck_matching(np.take_along_axis(after, best[..., None], 2)[..., 0])
    order, deferred = [], []
    for i, o in enumerate(over.tolist()):
        order += [o, int(under[partner[i]])]
        bits = int(best[i, partner[i]])
        deferred += [sample for place, sample in enumerate(movable[i]) if bits >> place & 1]
    return Pairing((*order, *alone), tuple(deferred))


def _movable(members: Sequence[int], work: np.ndarray) -> list[int]:
    heavy = sorted((i for i in members if work[i]), key=lambda i: (-int(work[i]), i))
    half = MAX_MOVABLE_SAMPLES // 2
    return heavy if len(heavy) <= MAX_MOVABLE_SAMPLES else heavy[:half] + heavy[-half:]


def _subset_sums(values: np.ndarray) -> np.ndarray:
    """The sum of each subset of each row of `values` `[rows, n]`, `[rows, 2**n]`; bit i of its index says whether value
    i is in it."""
    sums = np.zeros((len(values), 1), np.int64)
    for i in range(values.shape[1]):
        sums = np.concatenate([sums, sums + values[:, i : i + 1]], 1)
    return sums
