"""Bins of samples: longest processing time first (Graham, 1969), the two forms of who is where, fixed permutations."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

SCALE = 1 << 20
"""The mean load of a bin, after `normalised`."""


def normalised(work: np.ndarray, bins: int) -> np.ndarray:
    """Whole numbers in proportion to `work` `[samples, modules]`, such that `bins` bins hold `SCALE` each on average.

    Modules are comparable then, whatever their units. Each entry is rounded on its own, so order does not matter.
    """
    totals = np.array([max(int(total), 1) for total in work.sum(0)], np.float64)
    return np.rint(work / totals * float(SCALE * bins)).astype(np.int64)


def longest_first(load: np.ndarray, bins: int, capacity: int) -> np.ndarray:
    """LPT in rounds: the `bins` weightiest samples one each to the emptiest bins, then the next, and so on; int64
    `[bins, capacity]`: samples, where numbers from `len(load)` on stand for nobody.

    Weight and emptiness are those of the module that dominates; ties go to the sum over modules. `load`: int64
    `[samples, modules]`, at most `bins * capacity` samples.
    """
    count = bins * capacity
    order = np.lexsort((-load.sum(1), -load.max(1))) if len(load) else np.arange(0)
    padded = np.concatenate([load, np.zeros((count - len(load), load.shape[1]), np.int64)])
    order = np.concatenate([order, np.arange(len(load), count)])
    slots, total = np.empty((bins, capacity), np.int64), np.zeros((bins, load.shape[1]), np.int64)
    for i in range(capacity):
        taken = order[i * bins : (i + 1) * bins]
        emptiest = np.lexsort((total.sum(1), total.max(1)))
        slots[emptiest, i] = taken
        total[emptiest] += padded[taken]
    return slots


def least_loaded(
    order: np.ndarray,
    load: np.ndarray,
    choices: Sequence[Sequence[int]],
    *,
    group: np.ndarray | None = None,
    ties: np.ndarray | None = None,
    limit: int = 0,
) -> np.ndarray:
    """Each sample of `order` in turn to the bin with the least load: int64 `[samples]`, -1 for those not in `order`.

    Args:
        order: int64: samples.
        load: int64 `[samples]`.
        choices: per group, its bins.
        group: per sample; None: all in group 0.
        ties: int64 `[samples]`: of bins with equal load, the one with least of this; None: with fewest samples. So
            samples without any load spread too. Then the bin with the lowest number.
        limit: samples that a bin may hold; 0: any number.
    """
    heaps = [[(0, 0, b, 0) for b in sorted(bins)] for bins in choices]
    out, loads = np.full(len(load), -1, np.int64), load.tolist()
    second = [1] * len(load) if ties is None else ties.tolist()
    groups = [0] * len(load) if group is None else group.tolist()
    for sample in order.tolist():
        heap = heaps[groups[sample]]
        total, tie, chosen, count = heap[0]
        out[sample] = chosen
        if count + 1 == limit:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (total + loads[sample], tie + second[sample], chosen, count + 1))
    return out


@lru_cache(maxsize=512)
def scrambled(count: int, seed: int) -> np.ndarray:
    """A fixed permutation of `count` numbers for each `seed`: equal on every machine and under every version of numpy.

    Numbers are mixed as in SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    x = np.arange(count, dtype=np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out = np.argsort(x ^ (x >> np.uint64(31)), kind="stable")
    out.setflags(write=False)  # it is cached
    return out


def as_table(bins: np.ndarray, count: int, spare: int = 0) -> np.ndarray:
    """The samples of each bin, `[count, capacity]`, from the bin of each; nobody has numbers from `len(bins)` on.
    `spare`: empty places beside those of the fullest bin."""
    sizes = np.bincount(bins, minlength=count)
    table = np.full((count, int(sizes.max(initial=0)) + spare), len(bins), np.int64)
    order = np.argsort(bins, kind="stable")
    table[bins[order], np.arange(len(bins)) - np.repeat(np.cumsum(sizes) - sizes, sizes)] = order
    return table


def from_table(table: np.ndarray, samples: int) -> np.ndarray:
    """The bin of each sample; inverse of `as_table`."""
    out = np.empty(samples, np.int64)
    real = table < samples
    out[table[real]] = np.nonzero(real)[0]
    return out
