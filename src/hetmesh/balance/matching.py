"""Bottleneck matching: pairs of two equally large sets such that the dearest pair is as cheap as possible."""

from __future__ import annotations

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
