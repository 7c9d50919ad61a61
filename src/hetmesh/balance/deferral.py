"""Deferral: the last module takes some samples one microbatch late, so that its microbatches become equal.

Entrain (arXiv 2605.27918): microbatches with more than the median of LLM work are overloaded, the others underloaded.
Each overloaded one gets an underloaded partner that comes right after it, and hands it the samples whose work is
nearest to half the difference (subset sum, over all its samples); bottleneck matching chooses the partners.
"""

from __future__ import annotations

import bisect
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
    # the largest always suffices
    at = bisect.bisect_left(values, True, 1, len(values) - 1, key=lambda limit: _perfect(cost, limit) is not None)
    best = _perfect(cost, values[at])
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


SUMS = 256
"""Intervals of sums of work, of each of which one is known: a handover is found within about 1/256 of the difference
between two microbatches, and exactly where that is below 256 units."""
FORBIDDEN_LOAD = 1 << 62  # that no microbatch has


@dataclass(frozen=True)
class Pairing:
    """The order of one lane's microbatches (an overloaded one, the underloaded one that takes from it, the next two,
    and so on; one without a partner comes last), and the samples that the last module takes one place later."""

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
    heavy = [[i for i in members[o] if work[i]] for o in over.tolist()]
    width = max(map(len, heavy))
    table = np.array([samples + [-1] * (width - len(samples)) for samples in heavy], np.int64).reshape(half, width)
    weights = np.ones_like(work) if tokens is None or cap is None else tokens
    known = _handovers(table, work, weights, loads[over] - loads[under].min())
    after = np.maximum(loads[over][:, None, None] - known.work, loads[under][None, :, None] + known.work)
    fits = known.work >= 0
    if tokens is not None and cap is not None:
        held = np.array([int(tokens[list(members[u])].sum()) for u in under.tolist()])
        fits = fits & ((held[None, :, None] + known.weight <= cap) | (known.work == 0))
    after = np.where(fits, after, FORBIDDEN_LOAD)
    best = after.argmin(2)  # of equally good handovers the one that moves least work
    partner = bottleneck_matching(np.take_along_axis(after, best[..., None], 2)[..., 0])
    order, deferred = [], []
    for i, o in enumerate(over.tolist()):
        order += [o, int(under[partner[i]])]
        deferred += known.samples(i, int(best[i, partner[i]]))
    return Pairing((*order, *alone), tuple(deferred))


@dataclass(frozen=True, eq=False)
class _Handovers:
    """Subsets of the samples of some microbatches.

    Attributes:
        table: the samples of each, int64 `[microbatches, samples]`, -1 where there are fewer.
        work, weight: of the subset that is known of each interval of sums, int64 `[microbatches, 1, SUMS]`; -1: none.
        parents: per sample, from which interval it has led to which, int16 `[microbatches, SUMS]`; -1: it has not.
    """

    table: np.ndarray
    work: np.ndarray
    weight: np.ndarray
    parents: list[np.ndarray]

    def samples(self, row: int, interval: int) -> list[int]:
        """The subset that is known."""
        found = []
        for place in reversed(range(len(self.parents))):
            if (parent := int(self.parents[place][row, interval])) >= 0:
                found.append(int(self.table[row, place]))
                interval = parent
        return found


def _handovers(table: np.ndarray, work: np.ndarray, weights: np.ndarray, most: np.ndarray) -> _Handovers:
    """Subsets of each row of samples by their sums of work up to `most`: dynamic programming, sample by sample, over
    `SUMS` intervals, of each of which the subset with least weight is kept, with its exact sum."""
    shape = len(table), SUMS
    unit = np.maximum(most, 0) // SUMS + 1
    sums, weight = np.full(len(table) * SUMS, -1, np.int64), np.full(len(table) * SUMS, FORBIDDEN_LOAD, np.int64)
    sums[::SUMS] = weight[::SUMS] = 0
    parents = []
    for samples in table.T:
        here = samples >= 0
        known = np.flatnonzero((sums >= 0).reshape(shape) & here[:, None])
        row = known // SUMS
        total = sums[known] + work[samples][row]
        inside = total <= most[row]
        known, row, total = known[inside], row[inside], total[inside]
        target = row * SUMS + total // unit[row]
        held = weight[known] + weights[samples][row]
        better = held < weight[target]
        known, target = known[better], target[better]
        # Neighbouring intervals may lead to the same one: the last counts.
        sums[target], weight[target] = total[better], held[better]
        parent = np.full(len(sums), -1, np.int16)
        parent[target] = known % SUMS
        parents.append(parent.reshape(shape))
    return _Handovers(table, sums.reshape(shape)[:, None], weight.reshape(shape)[:, None], parents)
