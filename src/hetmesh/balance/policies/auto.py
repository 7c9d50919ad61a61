"""Choosing per batch: several balancers are run, a scoring function says which result is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hetmesh.balance.assignment import Assignment, spread
from hetmesh.balance.fewer import fewer_windows, no_larger, padded, with_windows
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.pipeline import Score, pipeline_score
from hetmesh.balance.policies.buckets import buckets
from hetmesh.balance.policies.entrain import entrain
from hetmesh.balance.policies.none import none
from hetmesh.balance.policies.sorted import by_length
from hetmesh.balance.policies.two_dim import arranged, balanced, two_dim

EVEN = 1.03  # where no microbatch is above the mean by more, nothing else is tried: it could gain hardly more than that
MARGIN = 0.005  # a later candidate must be faster by this; the first ones hold fewer rows or are simpler to read


def auto(loads: BatchLoads, slots: Slots, score: Score | None = None) -> Assignment:
    """The fastest of the candidates, or an earlier one that is as fast up to `MARGIN`.

    Args:
        score: what a step takes with an assignment; None: `pipeline_score`.
    """
    plain = replace(slots, deferral=False)
    bins = balanced(loads, plain)
    best = arranged(loads, plain, bins)
    tried = [best]
    even = not loads.pads and max(each.over_mean for each in spread(loads, best).values()) <= EVEN
    if score is not None or not even:
        score = score or pipeline_score(loads, slots)
        least = score(best)
        tried = [replace(best, score=least)]
        for found in _others(loads, slots, bins, best):
            length = score(found)
            tried.append(replace(found, score=length))
            if length < least * (1 - MARGIN):
                least, best = length, tried[-1]
    return replace(best, policy=f"auto: {best.policy}", tried=tuple(tried))


def _others(loads: BatchLoads, slots: Slots, bins: np.ndarray, first: Assignment) -> Iterator[Assignment]:
    """What is tried beside `first`, `two_dim`'s result with these bins. Policies that are not here were never faster by
    1% on any law of `tools/bench.py balance`."""
    plain = replace(slots, deferral=False)
    for windows in fewer_windows(loads, slots):
        found = padded(two_dim(loads, with_windows(plain, windows)), slots)
        if no_larger(found, first, loads):
            yield replace(found, policy=f"two_dim in {windows} windows")
    if slots.deferral:
        yield replace(arranged(loads, slots, bins), policy="two_dim with deferral")
        yield entrain(loads, slots)
    yield none(loads, slots)
    if loads.pads:
        yield by_length(loads, slots)
        yield buckets(loads, slots)
