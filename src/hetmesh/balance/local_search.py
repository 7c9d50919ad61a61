"""Improving full bins: pairs of bins pool five samples each and split them again in the best of all 126 ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from hetmesh.balance.lpt import SCALE, scrambled

POOLED_SAMPLES = 5  # of each bin: 126 ways; on chart-4k after 8 ms 4 leave a deviation 15% larger, 6 one as large
MANY_BINS = 2048  # bins from which on 4 are pooled (35 ways): half the time per round, and good partners are many
PEAK_ROUNDS = 24
PEAK_TOLERANCE = 0.01  # by how much a bin may be over its limit before it counts as a peak

Cost = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(module, load of the first bin minus that of the second `[ways, pairs]`, their sum `[pairs]`) -> what is minimised, a
term per module `[ways, pairs]`."""


def resplit(
    load: np.ndarray,
    bins: np.ndarray,
    rounds: int,
    *,
    target: np.ndarray | None = None,
    group: np.ndarray | None = None,
    tolerance: float = 0.0,
    limit: np.ndarray | None = None,
    seed: int = 0,
) -> np.ndarray:
    """`bins`, int64 `[bins, capacity]`, with less difference between them: a local search by exchanges between two.

    In every round all bins are paired: those with most load of a module with those with least, or at random. A pair
    takes the split that minimises the squared difference to its targets, summed over modules; all pairs and splits are
    scored by one matrix product. Loads are whole numbers below 2**53, so the product is exact in any order.

    Args:
        load: int64 `[samples, modules]`, normalised.
        bins: numbers from `len(load)` on stand for nobody (`fill.longest_first`).
        rounds: at most.
        target: int64 `[bins, modules]`: the load that each bin should have; None: equal ones.
        group: int64 `[bins]`: exchanges stay inside a group of bins; None: one group.
        tolerance: stop when no bin is further above its target, relative to `SCALE`, or holds one sample alone.
        limit: int64 `[modules]`: no bin gets further beyond it than it has to (`lower_peaks`).
        seed: of the random pairs.
    """
    count, capacity = bins.shape
    if count < 2 or not capacity or not load.shape[1]:
        return bins.copy()
    state = _State(load, bins, target)
    enough = tolerance * SCALE + (0 if target is not None else state.excess.mean(1, keepdims=True))
    cost: Cost = (lambda _, difference, __: difference * difference) if limit is None else _guarded(limit)
    for i in range(seed, seed + rounds):
        if tolerance and i % 4 == 0 and state.settled(enough):
            break
        first, second = _pairs(state.excess, i, group)
        state.exchange(first, second, *state.places(i), cost)
    return state.bins


def lower_peaks(load: np.ndarray, bins: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """`bins` whose fullest hold less, at the price of others: squares alone trade one high bin for many good ones.

    Bins over the limit are paired with others, now those with least load, now random ones; what counts is the squared
    load beyond the limit, then the squared difference. `limit`: int64 `[modules]`: what no bin need exceed: the mean
    load, or the largest sample.
    """
    count, capacity = bins.shape
    if count < 2 or not capacity:
        return bins.copy()
    state = _State(load, bins, None)
    bound, cost = limit[:, None].astype(np.float64), _guarded(limit)
    for i in range(PEAK_ROUNDS):
        beyond = (state.excess / bound).max(0)
        high = np.flatnonzero(beyond > 1 + PEAK_TOLERANCE)[: count // 2]
        if not len(high):
            break
        high = high[np.argsort(-beyond[high], kind="stable")]
        rest = np.setdiff1d(np.arange(count), high)
        by_load = np.argsort((state.excess[:, rest] / bound).sum(0), kind="stable")
        partner = rest[by_load if i % 3 == 0 else scrambled(len(rest), 3000 + i)][: len(high)]
        state.exchange(high[: len(partner)], partner, *state.places(i), cost)
    return state.bins


def _guarded(limit: np.ndarray) -> Cost:
    """What the fuller bin has beyond `limit` first, then the difference."""

    def cost(module: int, difference: np.ndarray, total: np.ndarray) -> np.ndarray:
        beyond = np.maximum(total + np.abs(difference) - 2 * float(limit[module]), 0.0)
        return 1e6 * beyond * beyond + difference * difference

    return cost


class _State:
    """Bins while they are improved: `values`, float64 `[modules, samples]`, are 0 for nobody, and `excess`, float64
    `[modules, bins]`, is the load of each bin, less its target."""

    def __init__(self, load: np.ndarray, bins: np.ndarray, target: np.ndarray | None) -> None:
        self.bins = bins.copy()
        self.pooled = min(bins.shape[1], POOLED_SAMPLES if len(bins) < MANY_BINS else POOLED_SAMPLES - 1)
        self.values = np.zeros((load.shape[1], max(int(bins.max()) + 1, len(load))))
        self.values[:, : len(load)] = load.T
        self.excess = self.values[:, bins].sum(2)
        if target is not None:
            self.excess -= target.T

    def places(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Which places of either bin are pooled in round `i`: in turn the first ones, where samples are moved to, so
        that small bins are pooled whole, and any."""
        if i % 2 == 0:
            self.bins.sort(axis=1)
            return np.arange(self.pooled), np.arange(self.pooled)
        one, other = (scrambled(self.bins.shape[1], 2 * i + side)[: self.pooled] for side in (0, 1))
        return one, other

    def exchange(self, first: np.ndarray, second: np.ndarray, mine: np.ndarray, theirs: np.ndarray, cost: Cost) -> None:
        """Split what `first` holds in the places `mine` and `second` in `theirs` again, each pair for itself."""
        bins, excess, pooled = self.bins, self.excess, self.pooled
        signs, members = _splits(pooled)
        both = np.concatenate([bins[first][:, mine], bins[second][:, theirs]], 1).T  # [2 pooled, pairs]
        total_cost = np.zeros((len(signs), len(first)))
        for m in range(len(self.values)):
            value = self.values[m][both]
            rest = excess[m, first] - excess[m, second] - value[:pooled].sum(0) + value[pooled:].sum(0)
            difference = signs @ value
            difference += rest
            total_cost += cost(m, difference, excess[m, first] + excess[m, second])
        new = np.take_along_axis(both, members[:, total_cost.argmin(0)], 0)
        bins[first[:, None], mine] = new[:pooled].T
        bins[second[:, None], theirs] = new[pooled:].T
        gained = self.values[:, new[:pooled]].sum(1) - self.values[:, both[:pooled]].sum(1)
        excess[:, first] += gained
        excess[:, second] -= gained

    def settled(self, limit: np.ndarray | float) -> bool:
        """Whether every bin within which samples could be exchanged is within `limit`."""
        over = (self.excess > limit).any(0)
        if not over.any():
            return True
        several = (self.values[:, self.bins[over]].sum(0) > 0).sum(1) > 1
        return not bool(several.any())


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
