"""The two forms of who is in which bin: the bin of every sample, and a table of the samples of every bin."""

from __future__ import annotations

import numpy as np


def as_table(bins: np.ndarray, count: int, spare: int = 0) -> np.ndarray:
    """The samples of each bin, `[count, capacity]`, from the bin of each; nobody has numbers from `len(bins)` on.

    Args:
        spare: empty places beside those of the fullest bin.
    """
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
