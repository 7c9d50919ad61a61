"""Improving full bins: pairs of bins pool four samples each and split them again in the best of all 35 ways."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

from hetmesh.balance.fill import SCALE, scrambled

POOLED = 4  # samples of each bin; 5 would score 126 ways for a result that was no better per second


def resplit(
    load: np.ndarray,
    bins: np.ndarray,
    rounds: int,
    *,
    target: np.ndarray | None = None,
    group: np.ndarray | None = None,
    tolerance: float = 0.0,
    equal_counts: bool = False,
) -> np.ndarray:
    """`bins` with less difference between them: a local search by exchanges between two bins at a time.

    In every round all bins are paired: those with most load of a module with those with least, or at random. A pair
    takes the split that minimises the squared difference to its targets, summed over modules; all pairs and splits are
    scored by one matrix product. Loads are whole numbers below 2**53, so the product is exact in any order.

    Args:
        load: int64 `[samples, modules]`, normalised.
        bins: int64 `[bins, capacity]`; numbers from `len(load)` on stand for nobody (`fill.longest_first`).
        rounds: at most.
        target: int64 `[bins, modules]`: the load that each bin should have; None: equal ones.
        group: int64 `[bins]`: exchanges stay inside a group of bins; None: one group.
        tolerance: stop when no bin is further above its target, relative to `SCALE`, or holds one sample alone.
        equal_counts: counts of samples differ by no more than one, and stay so.

    Returns:
        int64 `[bins, capacity]`.
    """
    count, capacity = bins.shape
    pooled = min(capacity, POOLED)
    bins, modules = bins.copy(), load.shape[1]
    if count < 2 or not capacity or not modules:
        return bins
    values = np.zeros((modules, max(int(bins.max()) + 1, len(load))))
    values[:, : len(load)] = load.T
    excess = values[:, bins].sum(2)  # [modules, bins]
    if target is not None:
        excess -= target.T
    limit = tolerance * SCALE + (0 if target is not None else excess.mean(1, keepdims=True))
    signs, members = _splits(pooled)
    for i in range(rounds):
        if tolerance and i % 4 == 0 and _good(excess, limit, values, bins):
            break
        first, second = _pairs(excess, i, group)
        mine, theirs = (scrambled(capacity, 2 * i + side)[:pooled] for side in (0, 1))
        both = np.concatenate([bins[first][:, mine], bins[second][:, theirs]], 1).T  # [2 pooled, pairs]
        cost = np.zeros((len(signs), len(first)))
        for m in range(modules):
            value = values[m][both]
            rest = excess[m, first] - excess[m, second] - value[:pooled].sum(0) + value[pooled:].sum(0)
            difference = signs @ value
            difference += rest
            difference *= difference
            cost += difference
        if equal_counts:
            count_of = np.where(both < len(load), 1.0, 0.0)
            rest = (bins[first] < len(load)).sum(1) - count_of[:pooled].sum(0)
            rest -= (bins[second] < len(load)).sum(1) - count_of[pooled:].sum(0)
            cost[np.abs(signs @ count_of + rest) > 1] = np.inf
        chosen = members[:, cost.argmin(0)]
        new = np.take_along_axis(both, chosen, 0)
        bins[first[:, None], mine] = new[:pooled].T
        bins[second[:, None], theirs] = new[pooled:].T
        gained = values[:, new[:pooled]].sum(1) - values[:, both[:pooled]].sum(1)
        excess[:, first] += gained
        excess[:, second] -= gained
    return bins


@lru_cache(maxsize=8)
def _splits(pooled: int) -> tuple[np.ndarray, np.ndarray]:
    """All ways to halve `2 * pooled` samples: signs `[ways, 2 pooled]`, and indices, the first half's first. The way
    they are comes first, so that nothing moves without gain."""
    halves = [half for half in itertools.combinations(range(2 * pooled), pooled) if 0 in half]
    others = [tuple(i for i in range(2 * pooled) if i not in half) for half in halves]
    signs = np.array([[1.0 if i in half else -1.0 for i in range(2 * pooled)] for half in halves])
    return signs, np.array([half + other for half, other in zip(halves, others, strict=True)]).T


def _pairs(excess: np.ndarray, i: int, group: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Bins to exchange in round `i`: the extremes of each module in turn, then random ones as often."""
    modules, count = excess.shape
    kind = i % (2 * modules)
    key = excess[kind] if kind < modules else scrambled(count, 1000 + i)
    if group is None:
        order = np.argsort(key, kind="stable")
        return order[: count // 2], order[::-1][: count // 2]
    order = np.lexsort((key, group))
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    size, start = sizes[group[order]], starts[group[order]]
    place = np.arange(count) - start
    low = place < size // 2
    return order[low], order[(start + size - 1 - place)[low]]


def _good(excess: np.ndarray, limit: np.ndarray | float, values: np.ndarray, bins: np.ndarray) -> bool:
    over = (excess > limit).any(0)
    if not over.any():
        return True
    several = (values[:, bins[over]].sum(0) > 0).sum(1) > 1
    return not bool(several.any())
