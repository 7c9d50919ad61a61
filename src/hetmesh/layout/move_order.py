"""In which order the tensors of a state go from one layout to another, so that no rank holds much more than the larger
of its shares meanwhile."""

from __future__ import annotations

import numpy as np


def move_order(before: np.ndarray, after: np.ndarray) -> tuple[list[int], float]:
    """The order in which items move, and the most that a rank then holds over the larger of its two shares.

    While an item moves its ranks hold it in both layouts, before it moves in the old one, afterwards in the new one.
    Each time that item is next after which the fullest rank is least full.

    Args:
        before, after: `[items, ranks]`, bytes that a rank holds of an item in the old and the new layout.
    """
    alike = np.unique(np.concatenate([before, after]).astype(np.float64), axis=1)  # ranks with equal shares count once
    before, after = np.split(alike, 2)
    larger = np.maximum(np.maximum(before.sum(0), after.sum(0)), 1.0)
    before, after = before / larger, after / larger
    held, peak = before.sum(0), 1.0
    grows = (after - before).max(1, initial=0.0)
    left, order = np.arange(len(before)), list[int]()
    while len(left):
        fullest = (held + after[left]).max(1, initial=0.0)
        least = np.flatnonzero(fullest <= fullest.min() + 1e-12)
        place = least[grows[left[least]].argmin()]
        item = int(left[place])
        peak = max(peak, float(fullest[place]))
        held += after[item] - before[item]
        order.append(item)
        left = np.delete(left, place)
    return order, peak
