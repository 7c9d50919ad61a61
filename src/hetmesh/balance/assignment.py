"""Assignment: what a balancer returns, in which microbatch and lane of each module every sample is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.errors import GraphError


@dataclass(frozen=True, eq=False)
class Assignment:
    """Every sample of a global batch in one microbatch and lane of each module.

    Attributes:
        lanes: of each module.
        microbatches: of each module; where they were free, not those that were asked for.
        microbatch: int64 `[samples, modules]`.
        lane: int64 `[samples, modules]`.
        deferred: bool `[samples]`: whether the last module takes the sample one microbatch later than the rest.
        policy: who made it; `auto` says whom it chose.
        score: what a step with it takes by what `auto` compares, in the unit of that; None: not compared.
        tried: by `auto`: what it chose from, in that order; a single one where that was even enough.
    """

    lanes: tuple[int, ...]
    microbatches: tuple[int, ...]
    microbatch: np.ndarray
    lane: np.ndarray
    deferred: np.ndarray
    policy: str = ""
    score: float | None = None
    tried: tuple[Assignment, ...] = ()

    def __post_init__(self) -> None:
        for name, values, sizes in (
            ("microbatch", self.microbatch, self.microbatches),
            ("lane", self.lane, self.lanes),
        ):
            if values.shape != (len(self.deferred), len(sizes)):
                raise GraphError(f"assignment: {name} must have shape {(len(self.deferred), len(sizes))}")
            if values.size and (values.min() < 0 or (values >= np.array(sizes)).any()):
                raise GraphError(f"assignment: {name} must be below {sizes} for each module")

    def __len__(self) -> int:
        return len(self.deferred)

    def sums(self, values: np.ndarray) -> tuple[np.ndarray, ...]:
        """Per module the sums of `values` `[samples, modules]` over each microbatch and lane, int64
        `[microbatches, lanes]`."""
        return tuple(
            _sums(values[:, i], self.microbatch[:, i] * lanes + self.lane[:, i], count * lanes).reshape(count, lanes)
            for i, (count, lanes) in enumerate(zip(self.microbatches, self.lanes, strict=True))
        )

    def padding_work(self, loads: BatchLoads) -> np.ndarray:
        """What the last module computes beside its samples in each microbatch and lane, because it pads them to the
        longest; int64 `[microbatches, lanes]`."""
        shape = self.microbatches[-1], self.lanes[-1]
        lengths, bins = loads.tokens[:, -1], self.microbatch[:, -1] * self.lanes[-1] + self.lane[:, -1]
        longest = np.zeros(shape[0] * shape[1], np.int64)
        np.maximum.at(longest, bins, lengths)
        real = _sums(loads.padded_work(np.ones_like(lengths), lengths), bins, len(longest))
        return (loads.padded_work(self.counts[-1].ravel(), longest) - real).reshape(shape)

    @cached_property
    def counts(self) -> tuple[np.ndarray, ...]:
        """Per module how many samples each microbatch and lane has, `[microbatches, lanes]`."""
        return self.sums(np.ones(self.lane.shape, np.int64))

    def permuted(self, places: np.ndarray) -> Assignment:
        """Of the samples at `places`, in that order."""
        return Assignment(
            self.lanes,
            self.microbatches,
            self.microbatch[places],
            self.lane[places],
            self.deferred[places],
            self.policy,
            self.score,
            tuple(each.permuted(places) for each in self.tried),
        )


def _sums(values: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros(count, np.int64)
    np.add.at(out, bins, values)
    return out


@dataclass(frozen=True)
class Spread:
    """How evenly the work of one module lies over its microbatches and lanes.

    Attributes:
        mean, largest: work of one microbatch on one lane.
        deviation: standard deviation over those that hold a sample.
        over_mean: largest over mean; 1.0 where there is no work.
        over_bound: largest over what no assignment can go below: the larger of the mean and of the largest sample.
    """

    mean: float
    largest: int
    deviation: float
    over_mean: float
    over_bound: float


def spread(loads: BatchLoads, assignment: Assignment) -> dict[str, Spread]:
    """Per module how evenly `assignment` spreads the work of `loads`."""
    out = {}
    for i, (name, bins) in enumerate(zip(loads.modules, assignment.sums(loads.work), strict=True)):
        mean, largest = float(bins.mean()), int(bins.max())
        bound = max(mean, int(loads.work[:, i].max(initial=0)))
        ratios = (largest / mean, largest / bound) if mean else (1.0, 1.0)
        used = bins[assignment.counts[i] > 0]
        out[name] = Spread(mean, largest, float(used.std()) if used.size else 0.0, *ratios)
    return out


def check(loads: BatchLoads, slots: Slots, assignment: Assignment) -> Assignment:
    """`assignment`, if it keeps every cap of `slots`.

    Raises:
        GraphError: names the module, microbatch, lane and cap.
    """
    for i, (name, bins) in enumerate(zip(loads.modules, assignment.sums(loads.tokens), strict=True)):
        cap = slots.max_tokens[i]
        if cap is not None and bins.size and bins.max() > cap:
            microbatch, lane = np.unravel_index(int(bins.argmax()), bins.shape)
            raise GraphError(
                f"balance: module {name!r} would take {bins.max()} tokens in microbatch {microbatch} of lane {lane}; "
                f"max_tokens is {cap}"
            )
    return assignment
