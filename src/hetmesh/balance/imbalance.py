"""How even the microbatches and lanes of a batch are: metrics of logged steps, and what `hetmesh balance` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads
from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.balance.co_located import led_modules


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


@dataclass(frozen=True)
class ModuleLoad:
    """How the work of one module lies over its microbatches and lanes.

    Attributes:
        max_over_mean: the largest of one microbatch on one lane over the mean one; 1.0 where there is no work.
        std_over_mean: the standard deviation of those that hold a sample, over the mean.
        padding: share of the positions it computes that are padding.
    """

    max_over_mean: float
    std_over_mean: float
    padding: float


@dataclass(frozen=True)
class BatchLoad:
    """How even one batch is: the `led_modules`, with what goes along with them, and how many samples the last module
    takes in a later microbatch than a module before it."""

    modules: Mapping[str, ModuleLoad]
    deferred: int


def batch_load(loads: BatchLoads, assignment: Assignment, *, padded: bool) -> BatchLoad:
    """How even `assignment` is. `padded`: whether the last module pads its samples to the longest of each microbatch
    and lane."""
    modules = {}
    for name, even in spread(loads, assignment).items():
        padding = _padding(loads, assignment) if padded and name == loads.modules[-1] else 0.0
        modules[name] = ModuleLoad(even.over_mean, even.deviation / even.mean if even.mean else 0.0, padding)
    return BatchLoad(modules, int(_late(assignment).sum()))


def plan_assignment(plan: BatchPlan) -> Assignment:
    """Where the samples of `plan` are for each of its `led_modules`, as numbers: what it was made from."""
    own = led_modules(plan.graph)
    counts = tuple(len(plan.lanes[name]) for name in own)
    microbatch = np.stack([plan.microbatch_of(name) for name in own], 1)
    lane = np.empty_like(microbatch)
    for i, name in enumerate(own):
        parts = [part for lanes in plan.lanes[name] for part in lanes]
        samples = np.concatenate([np.asarray(part, np.int64) for part in parts])
        numbers = np.tile(np.arange(plan.graph[name].num_lanes), counts[i])
        lane[samples, i] = np.repeat(numbers, [len(part) for part in parts])
    widths = tuple(plan.graph[name].num_lanes for name in own)
    found = Assignment(widths, counts, microbatch, lane, np.zeros(len(microbatch), bool))
    return Assignment(widths, counts, microbatch, lane, _late(found))


def _late(assignment: Assignment) -> np.ndarray:
    """Whether the last module takes a sample later than another module, bool `[samples]`; where modules have other
    numbers of microbatches, by the windows that they have in common."""
    counts = np.array(assignment.microbatches)
    window = assignment.microbatch * counts.min() // counts
    return np.asarray((window[:, -1:] > window[:, :-1]).any(1))


def _padding(loads: BatchLoads, assignment: Assignment) -> float:
    tokens, lanes = loads.tokens[:, -1], assignment.lanes[-1]
    bins = assignment.microbatch[:, -1] * lanes + assignment.lane[:, -1]
    longest = np.zeros(assignment.microbatches[-1] * lanes, np.int64)
    np.maximum.at(longest, bins, tokens)
    computed = int((longest * assignment.counts[-1].ravel()).sum())
    return 1 - int(tokens.sum()) / computed if computed else 0.0
