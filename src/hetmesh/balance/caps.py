"""Caps are hard: samples move, or change places, until no bin is over its own; first fit from scratch if that fails."""

from __future__ import annotations

import numpy as np

NO_CAP = 1 << 62


def within_caps(
    bins: np.ndarray, tokens: np.ndarray, caps: np.ndarray, load: np.ndarray, allowed: np.ndarray | None = None
) -> np.ndarray | None:
    """`bins`, mended until every bin is within its caps; None where no way was found.

    Args:
        bins: int64 `[samples]`: the bin of each.
        tokens: int64 `[samples, caps]`: what a sample counts against each cap.
        caps: int64 `[bins, caps]`; `NO_CAP`: none.
        load: int64 `[samples]`: of several bins with room, a sample goes to the one with least load.
        allowed: int64 `[bins]`: a sample stays among bins with the same number as its own; None: anywhere.
    """
    mended = _moved(bins, tokens, caps, load, allowed)
    return _from_scratch(bins, tokens, caps, allowed) if mended is None else mended


def _moved(
    bins: np.ndarray, tokens: np.ndarray, caps: np.ndarray, load: np.ndarray, allowed: np.ndarray | None
) -> np.ndarray | None:
    """Take the smallest sample that suffices out of each bin that is over, to where there is room or in exchange."""
    bins = bins.copy()
    held = np.zeros_like(caps)
    np.add.at(held, bins, tokens)
    loads = np.zeros(len(caps), np.int64)
    np.add.at(loads, bins, load)

    def move(sample: int, target: int) -> None:
        for bin_, sign in ((bins[sample], -1), (target, 1)):
            held[bin_] += sign * tokens[sample]
            loads[bin_] += sign * load[sample]
        bins[sample] = target

    for _ in range(4 * len(bins) + 4):
        over = np.flatnonzero((held > caps).any(1))
        if not len(over):
            return bins
        source = int(over[0])
        cap = int(np.argmax(held[source] - caps[source]))
        excess = int(held[source, cap] - caps[source, cap])
        inside = np.flatnonzero(bins == source)
        inside = inside[np.argsort(tokens[inside, cap], kind="stable")]
        enough = inside[tokens[inside, cap] >= excess]
        reach = np.ones(len(caps), bool) if allowed is None else allowed == allowed[source]
        reach[source] = False
        if not _moved_out([*enough, *inside[::-1]], tokens, held, caps, loads, reach, move) and not _exchanged(
            inside[::-1], cap, bins, tokens, held, caps, reach, move
        ):
            return None
    return None


def _moved_out(samples, tokens, held, caps, loads, reach, move) -> bool:  # type: ignore[no-untyped-def]
    """Move the first of `samples` that fits anywhere to the bin with least load; whether there was one."""
    for sample in samples:
        room = np.flatnonzero(reach & (held + tokens[sample] <= caps).all(1))
        if len(room) and tokens[sample].any():
            move(sample, int(room[np.argmin(loads[room])]))
            return True
    return False


def _exchanged(samples, cap, bins, tokens, held, caps, reach, move) -> bool:  # type: ignore[no-untyped-def]
    """Exchange one of `samples` for a smaller one of another bin that then keeps its caps; whether there was one."""
    for sample in samples:
        partners = np.flatnonzero(reach[bins] & (tokens[:, cap] < tokens[sample, cap]))
        after = held[bins[partners]] + tokens[sample] - tokens[partners]
        fits = partners[(after <= caps[bins[partners]]).all(1)]
        if len(fits):
            partner = int(fits[np.argmin(tokens[fits, cap])])
            source, target = int(bins[sample]), int(bins[partner])
            move(sample, target)
            move(partner, source)
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
