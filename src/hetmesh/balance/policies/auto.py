"""Choosing per batch: several balancers are run, a scoring function says which result is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.imbalance import spread
from hetmesh.balance.policies.baselines import buckets, by_length, none
from hetmesh.balance.policies.entrain import entrain
from hetmesh.balance.policies.two_dim import arranged, balanced
from hetmesh.balance.step_lengths import Score, pipeline_score
from hetmesh.balance.window_counts import fewer_windows, free_windows, no_larger, with_windows
from hetmesh.errors import GraphError

EVEN_RATIO = 1.03  # where no microbatch is above the mean by more, nothing else is tried: it could hardly gain more
SMALLER_PEAK_SHARE = 0.9  # a largest microbatch below this share of another's saves memory worth the name
MIN_GAIN = 0.005  # a later candidate must be faster by this; the first ones hold fewer rows or are simpler to read


def auto(loads: BatchLoads, slots: Slots) -> Assignment:
    """The fastest of the candidates, or an earlier one that is as fast up to `MIN_GAIN`. `slots`: where the number of
    microbatches is free, other ones are candidates too; of two that are as fast the one with clearly smaller
    microbatches is taken. Raises GraphError: no way was found to keep a cap in as many microbatches as asked for."""
    bins = balanced(loads, replace(slots, deferral=False))
    trial = _Trial(arranged(loads, replace(slots, deferral=False), bins), pipeline_score(loads, slots))
    if slots.free:
        for windows, found_bins, found in _in_windows(loads, slots, free_windows(loads, slots, trial.score)):
            smaller = not loads.pads and _largest(loads, found) < SMALLER_PEAK_SHARE * _largest(loads, trial.best)
            if trial.add(found, smaller):
                slots, bins = with_windows(slots, windows), found_bins
    even = not loads.pads and max(ratio.over_mean for ratio in spread(loads, trial.best).values()) <= EVEN_RATIO
    if not even:
        for make in _others(loads, slots, bins, trial.best):
            with suppress(GraphError):  # a cap that this one cannot keep
                trial.add(make())
    return replace(trial.best, policy=f"auto: {trial.best.policy}", tried=tuple(trial.tried))


def _largest(loads: BatchLoads, found: Assignment) -> float:
    """The largest microbatch: of the module where it is largest, in its total work."""
    totals = loads.work.sum(0)
    return max(
        float(bins.max(initial=0)) / max(int(total), 1)
        for bins, total in zip(found.sums(loads.work), totals, strict=True)
    )


class _Trial:
    """Candidates, one after the other; all so far are `tried`, without a score while there is but one."""

    def __init__(self, first: Assignment, score: Score) -> None:
        self.score, self.best, self.tried = score, first, [first]
        self.least: float | None = None

    def add(self, found: Assignment, smaller: bool = False) -> bool:
        """Whether it is the best now: faster by `MIN_GAIN`, or, where its largest microbatch is `smaller`, as fast."""
        if self.least is None:
            self.least = self.score(self.best)
            self.tried = [replace(self.best, score=self.least)]
        length = self.score(found)
        self.tried.append(replace(found, score=length))
        better = length < self.least * (1 + MIN_GAIN if smaller else 1 - MIN_GAIN)
        if better:
            self.least, self.best = length, self.tried[-1]
        return better


def _in_windows(
    loads: BatchLoads, slots: Slots, numbers: Iterable[int]
) -> Iterator[tuple[int, np.ndarray, Assignment]]:
    """`two_dim` without deferral in other numbers of windows, where they keep the caps: number, bins, result."""
    for windows in numbers:
        other = with_windows(replace(slots, deferral=False), windows)
        with suppress(GraphError):  # too few for a cap
            bins = balanced(loads, other)
            yield windows, bins, replace(arranged(loads, other, bins), policy=f"two_dim in {windows} windows")


def _others(loads: BatchLoads, slots: Slots, bins: np.ndarray, first: Assignment) -> Iterator[Callable[[], Assignment]]:
    """What is tried beside `first`, `two_dim`'s result. Others were never 1% faster (`bench.py balance`)."""
    if not slots.free:
        for *_, fewer in _in_windows(loads, slots, fewer_windows(loads, slots)):
            found = replace(fewer, microbatches=slots.microbatches)  # with empty ones at its end
            if no_larger(found, first, loads):
                yield partial(replace, found)
    if slots.deferral:
        yield lambda: replace(arranged(loads, slots, bins), policy="two_dim with deferral")
        yield lambda: entrain(loads, slots)
    yield lambda: none(loads, slots)
    if loads.pads:
        yield lambda: by_length(loads, slots)
        yield lambda: buckets(loads, slots)
