"""Choosing per batch: several balancers are run, a scoring function says which result is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetmesh.balance.assignment import Assignment, spread
from hetmesh.balance.fewer import fewer_windows, no_larger, padded, with_windows
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.pipeline import Score, pipeline_score
from hetmesh.balance.policies.entrain import entrain
from hetmesh.balance.policies.none import none
from hetmesh.balance.policies.two_dim import arranged, balanced, two_dim

EVEN = 1.03  # no microbatch above the mean by more: nothing else is tried, for it could not gain more than that
MARGIN = 0.005  # a later candidate must be faster by this; the first ones hold fewer rows or are simpler to read


def auto(loads: BatchLoads, slots: Slots, score: Score | None = None) -> Assignment:
    """The fastest of the candidates, or an earlier one that is as fast up to `MARGIN`.

    Args:
        score: what a step takes with an assignment; None: `pipeline_score`.
    """
    score = score or pipeline_score(loads, slots)
    best: tuple[float, Assignment] | None = None
    for found in candidates(loads, slots):
        length = score(found)
        if best is None or length < best[0] * (1 - MARGIN):
            best = length, found
    assert best is not None
    return replace(best[1], policy=f"auto: {best[1].policy}")


def candidates(loads: BatchLoads, slots: Slots) -> Iterator[Assignment]:
    """What `auto` chooses from. The other policies were never faster than all of these by 1% on any law of
    `tools/bench.py balance`."""
    plain = replace(slots, deferral=False)
    bins = balanced(loads, plain)
    first = arranged(loads, plain, bins)
    yield first
    if max(each.over_mean for each in spread(loads, first).values()) <= EVEN:
        return
    for windows in fewer_windows(loads, slots):
        found = padded(two_dim(loads, with_windows(plain, windows)), slots)
        if no_larger(found, first, loads):
            yield replace(found, policy=f"two_dim in {windows} windows")
    if slots.deferral:
        yield replace(arranged(loads, slots, bins), policy="two_dim with deferral")
        yield entrain(loads, slots)
    yield none(loads, slots)
