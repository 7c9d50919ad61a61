"""Caps are hard: samples move, or change places, until no bin is over its own; first fit from scratch if that fails."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

NO_CAP = 1 << 62


def within_caps(
    bins: np.ndarray, tokens: np.ndarray, caps: np.ndarray, load: np.ndarray, allowed: np.ndarray | None = None
) -> np.ndarray | None:
    """`bins`, repaired until every bin is within its caps; None where no way was found.

    Args:
        bins: int64 `[samples]`: the bin of each.
        tokens: int64 `[samples, caps]`: what a sample counts against each cap.
        caps: int64 `[bins, caps]`; `NO_CAP`: none.
        load: int64 `[samples]`: of several bins with room, a sample goes to the one with least load.
        allowed: int64 `[bins]`: a sample stays among bins with the same number as its own; None: anywhere.
    """
    repaired = _moved(bins, tokens, caps, load, allowed)
    return _from_scratch(bins, tokens, caps, allowed) if repaired is None else repaired


def _moved(
    bins: np.ndarray, tokens: np.ndarray, caps: np.ndarray, load: np.ndarray, allowed: np.ndarray | None
) -> np.ndarray | None:
    """Take the smallest sample that suffices out of each bin that is over, to where there is room or in exchange."""
    held = _Held(bins, tokens, caps, load)
    for _ in range(4 * len(bins) + 4):
        over = np.flatnonzero((held.tokens > caps).any(1))
        if not len(over):
            return held.bins
        source = int(over[0])
        cap = int(np.argmax(held.tokens[source] - caps[source]))
        excess = int(held.tokens[source, cap] - caps[source, cap])
        inside = np.flatnonzero(held.bins == source)
        inside = inside[np.argsort(tokens[inside, cap], kind="stable")]
        inside = inside[tokens[inside, cap] > 0]
        enough = inside[tokens[inside, cap] >= excess]
        reach = np.ones(len(caps), bool) if allowed is None else allowed == allowed[source]
        reach[source] = False
        if not held.move_one([*enough, *inside[::-1]], reach) and not held.exchange_one(inside[::-1], cap, reach):
            return None
    return None


class _Held:
    """What bins hold while samples move."""

    def __init__(self, bins: np.ndarray, sizes: np.ndarray, caps: np.ndarray, load: np.ndarray) -> None:
        self.bins, self.sizes, self.caps, self.load = bins.copy(), sizes, caps, load
        self.tokens, self.loads = np.zeros_like(caps), np.zeros(len(caps), np.int64)
        np.add.at(self.tokens, bins, sizes)
        np.add.at(self.loads, bins, load)

    def move(self, sample: int, target: int) -> None:
        for bin_, sign in ((self.bins[sample], -1), (target, 1)):
            self.tokens[bin_] += sign * self.sizes[sample]
            self.loads[bin_] += sign * self.load[sample]
        self.bins[sample] = target

    def move_one(self, samples: Iterable[int], reach: np.ndarray) -> bool:
        """Move the first of `samples` that fits anywhere to the bin with least load; whether there was one."""
        for sample in samples:
            room = np.flatnonzero(reach & (self.tokens + self.sizes[sample] <= self.caps).all(1))
            if len(room):
                self.move(sample, int(room[np.argmin(self.loads[room])]))
                return True
        return False

    def exchange_one(self, samples: Iterable[int], cap: int, reach: np.ndarray) -> bool:
        """Exchange one of `samples` for a smaller one of a bin that then keeps its caps; whether there was one."""
        bins, sizes = self.bins, self.sizes
        for sample in samples:
            partners = np.flatnonzero(reach[bins] & (sizes[:, cap] < sizes[sample, cap]))
            after = self.tokens[bins[partners]] + sizes[sample] - sizes[partners]
            fits = partners[(after <= self.caps[bins[partners]]).all(1)]
            if len(fits):
                partner = int(fits[np.argmin(sizes[fits, cap])])
                source, target = int(bins[sample]), int(bins[partner])
                self.move(sample, target)
                self.move(partner, source)
                return True
        return False


def _from_scratch(
    bins: np.ndarray, tokens: np.ndarray, caps: np.ndarray, allowed: np.ndarray | None
) -> np.ndarray | None:
    """Best fit, the largest first (by the share of a cap): a classic for bin packing, here with several caps."""
    out, held = np.empty_like(bins), np.zeros_like(caps)
    share = (tokens / np.maximum(caps.max(0), 1)).max(1)
    for sample in np.argsort(-share, kind="stable").tolist():
        reach = True if allowed is None else allowed == allowed[bins[sample]]
        room = np.flatnonzero(reach & (held + tokens[sample] <= caps).all(1))
        if not len(room):
            return None
        left = ((caps[room] - held[room] - tokens[sample]) / np.maximum(caps[room], 1)).min(1)
        best = int(room[np.argmin(left)])
        out[sample] = best
        held[best] += tokens[sample]
    return out
