"""The one place that runs a balancer: checks what it is given, makes its result independent of order, keeps caps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots, check
from hetmesh.balance.policies import POLICIES
from hetmesh.balance.step_lengths import pipeline_score
from hetmesh.errors import GraphError

MICROBATCH_FACTORS = (1.0, 0.5, 0.625, 0.75, 0.875, 1.25, 1.5, 2.0)  # times the recipe's number of microbatches


def assign(loads: BatchLoads, slots: Slots, policy: str = "auto") -> Assignment:
    """In which microbatch and lane of each module every sample of a batch is.

    A pure function: equal numbers give an equal result on every rank, machine and number of threads, and the samples
    may come in any order (by their keys they are the same).

    Args:
        policy: a key of `POLICIES`; `auto`, and a free number of microbatches, choose by `pipeline_score`.

    Raises:
        GraphError: the policy is unknown, a sample alone exceeds a cap, or no way was found to keep the caps.
    """
    if policy not in POLICIES:
        raise GraphError(f"balance policy {policy!r}: valid are {sorted(POLICIES)}")
    if len(slots.lanes) != len(loads.modules):
        raise GraphError(f"balance: {len(loads.modules)} modules, but lanes of {len(slots.lanes)}")
    _refuse_giants(loads, slots)
    order = np.argsort(loads.keys, kind="stable")
    by_key = loads.select(order)
    found = _free(by_key, slots, policy) if slots.free else POLICIES[policy](by_key, slots)
    check(by_key, slots, found)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return found.permuted(back)


def _free(loads: BatchLoads, slots: Slots, policy: str) -> Assignment:
    """The best number of microbatches; the one asked for, where others are no better. `auto` looks around by itself."""
    numbers = (tuple(max(1, round(n * factor)) for n in slots.microbatches) for factor in MICROBATCH_FACTORS)
    found: list[Assignment] = []
    problems: list[GraphError] = []
    for counts in dict.fromkeys(numbers):
        try:
            found.append(POLICIES[policy](loads, replace(slots, microbatches=counts)))
        except GraphError as error:  # too few for a cap, perhaps
            problems.append(error)
        if found and policy == "auto":
            return found[0]
    if not found:
        raise problems[0]
    return min(found, key=pipeline_score(loads, slots))


def _refuse_giants(loads: BatchLoads, slots: Slots) -> None:
    for i, (name, cap) in enumerate(zip(loads.modules, slots.max_tokens, strict=True)):
        if cap is not None and len(loads) and loads.tokens[:, i].max() > cap:
            sample = int(loads.tokens[:, i].argmax())
            raise GraphError(
                f"balance: sample {loads.name(sample)!r} has {loads.tokens[sample, i]} tokens for module {name!r}; "
                f"max_tokens of one microbatch is {cap}"
            )
