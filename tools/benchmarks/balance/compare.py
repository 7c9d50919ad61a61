"""Every balancer on batches of one law: how long a step takes, and how even microbatches are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.balance.cases import LANES, MICROBATCHES, Case
from hetmesh.balance import BatchLoads, Slots, assign, pipeline_score, spread

BALANCERS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "sorted": {},
    "lpt": {},
    "disttrain": {},
    "entrain": {"deferral": True},
    "two_dim": {},
    "two_dim with deferral": {"deferral": True},
    "auto": {"deferral": True},
    "auto without deferral": {},
    "auto, free": {"deferral": True, "free": True},
}
"""What is compared: a policy, and what of `Slots` it is given."""
OURS: Mapping[str, str] = {"": "auto, free", "_fixed": "auto", "_default": "auto without deferral"}
"""What ends the keys of `auto` -> which one it is."""
UNSEEN = 0.1
"""Deviation of the logarithm of what a sample takes over what balancers think that it takes."""


@dataclass
class Sums:
    """Of one balancer, over batches: step lengths, those by costs that it has not seen, and per module lists of one
    number per batch."""

    lengths: list[float] = field(default_factory=list)
    unseen: list[float] = field(default_factory=list)
    deviations: list[list[float]] = field(default_factory=list)
    over_bound: list[list[float]] = field(default_factory=list)
    over_mean: list[list[float]] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)
    deferred: list[float] = field(default_factory=list)


def compare(case: Case, per_microbatch: int, batches: int) -> dict[str, Any]:
    """What all balancers make of `batches` batches of `per_microbatch` samples per lane and microbatch."""
    sums = {name: Sums() for name in BALANCERS}
    slots = case.slots()
    bounds = []
    for batch in range(batches):
        count = LANES * MICROBATCHES * per_microbatch
        loads = case.loads(count, 1000 * per_microbatch + batch, batch / max(batches - 1, 1))
        bounds.append(pair_bound(loads, LANES * MICROBATCHES))
        unseen = with_unseen_costs(loads, batch)
        for name, sum_ in sums.items():
            _add(sum_, loads, unseen, slots, name)
    none = sums["none"]
    out: dict[str, Any] = {"law": case.name, "samples_per_microbatch": per_microbatch, "balancers": {}}
    for name, sum_ in sums.items():
        reduction = np.mean(none.deviations, 0) / np.maximum(np.mean(sum_.deviations, 0), 1e-9)
        out["balancers"][name] = {
            "throughput_gain": sum(none.lengths) / sum(sum_.lengths),
            "std_reduction": _named(case, reduction),
            "over_bound": _named(case, np.mean(sum_.over_bound, 0)),
            "over_mean": _named(case, np.mean(sum_.over_mean, 0)),
            "deferred_share": float(np.mean(sum_.deferred)),
        }
    gain = {name: each["throughput_gain"] for name, each in out["balancers"].items()}
    others = [name for name in gain if name not in OURS.values()]
    best = max(others, key=gain.__getitem__)
    unseen = {name: sum(sum_.unseen) for name, sum_ in sums.items()}
    least = min(unseen[name] for name in others)
    return out | {
        "best": best,
        **{f"auto_regret{suffix}": max(gain[best] / gain[name] - 1, 0.0) for suffix, name in OURS.items()},
        **{f"auto_regret_unseen{suffix}": unseen[name] / least - 1 for suffix, name in OURS.items()},
        **{f"auto_choices{suffix}": dict(sums[name].choices) for suffix, name in OURS.items()},
        "unavoidable_over_bound": _named(case, np.mean(bounds, 0)),
    }


def with_unseen_costs(loads: BatchLoads, seed: int) -> BatchLoads:
    """The same samples, each of which takes a little more or less in each module than balancers think."""
    factors = np.exp(UNSEEN * np.random.default_rng(seed).standard_normal(loads.work.shape))
    return replace(loads, work=np.rint(loads.work * factors).astype(np.int64))


def _add(sums: Sums, loads: BatchLoads, unseen: BatchLoads, slots: Slots, name: str) -> None:
    given = {"deferral": False} | dict(BALANCERS[name])
    found = assign(loads, replace(slots, **given), name.partition(" ")[0].strip(","))
    each = spread(loads, found)
    sums.lengths.append(pipeline_score(loads, slots)(found))
    sums.unseen.append(pipeline_score(unseen, slots)(found))
    sums.deviations.append([each[m].deviation for m in loads.modules])
    sums.over_bound.append([each[m].over_bound for m in loads.modules])
    sums.over_mean.append([each[m].over_mean for m in loads.modules])
    sums.choices[found.policy.removeprefix("auto: ")] += 1
    sums.deferred.append(float(found.deferred.mean()))


def pair_bound(loads: BatchLoads, bins: int) -> list[float]:
    """Per module what no assignment to `bins` microbatches can go below, over the bound of `Spread.over_bound`: of the
    bins + 1 largest samples two share a microbatch, of the 2 bins + 1 largest three, and so on."""
    out = []
    for column in loads.work.T:
        falling = np.sort(column)[::-1]
        simple = max(falling.sum() / bins, falling[0])
        ways = range(2, (len(falling) - 1) // bins + 2)
        least = [falling[(k - 1) * bins + 1 - k : (k - 1) * bins + 1].sum() for k in ways]
        out.append(float(max([simple, *least]) / simple) if simple else 1.0)
    return out


def _named(case: Case, values: np.ndarray) -> dict[str, float]:
    return dict(zip(case.modules, map(float, values), strict=True))
