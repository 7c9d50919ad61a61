"""Bottleneck matching: pairs of two equally large sets such that the dearest pair is as cheap as possible."""

from __future__ import annotations

import numpy as np


def bottleneck_matching(cost: np.ndarray) -> list[int]:
    """The partner of each row of `cost` `[n, n]`: a perfect matching whose largest cost is as small as possible.

    Binary search over the costs that occur; for each, whether the pairs that cost no more hold a perfect matching, by
    augmenting paths (Kuhn). As in Entrain (arXiv 2605.27918).
    """
    values = np.unique(cost)
    low, high = 0, len(values) - 1
    best = _perfect(cost, values[high]) if len(values) else []
    while low < high:
        middle = (low + high) // 2
        found = _perfect(cost, values[middle])
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
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
