"""Deferral: the last module takes some samples one microbatch late, so that its microbatches become equal.

Entrain (arXiv 2605.27918): microbatches with more than the median of LLM work are overloaded, the others underloaded.
Each overloaded one gets an underloaded partner that comes right after it, and hands it the samples whose work is nearest
to half the difference (subset sum); bottleneck matching chooses the partners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetmesh.balance.matching import bottleneck_matching

MOVABLE = 12  # samples of one microbatch among which a subset is sought: 4,096 sums; the heaviest and the lightest
FORBIDDEN = 1 << 60


@dataclass(frozen=True)
class Pairing:
    """What one lane defers.

    Attributes:
        order: its microbatches: an overloaded one, the underloaded one that takes from it, the next two, and so on; one
            without a partner comes last.
        deferred: the samples that the last module takes one place later than the order says.
    """

    order: tuple[int, ...]
    deferred: tuple[int, ...]


def defer(
    members: Sequence[Sequence[int]],
    work: np.ndarray,
    tokens: np.ndarray | None = None,
    cap: int | None = None,
) -> Pairing:
    """Pair the microbatches of one lane and choose what is deferred.

    Args:
        members: the samples of each microbatch.
        work: int64 `[samples]`: of the last module.
        tokens: int64 `[samples]`; with `cap`, what a microbatch may hold of them after it took over others.
    """
    half = len(members) // 2
    loads = np.array([int(work[list(m)].sum()) for m in members], np.int64)
    heaviest = np.argsort(-loads, kind="stable")
    over, under = heaviest[:half].tolist(), heaviest[len(members) - half :].tolist()
    alone = heaviest[half : len(members) - half].tolist()
    if not half:
        return Pairing(tuple(alone), ())
    held = None if tokens is None or cap is None else (tokens, [int(tokens[list(members[u])].sum()) for u in under], cap)
    costs, subsets, movable = [], [], []
    for o in over:
        chosen = _movable(members[o], work)
        cost, subset = _handovers(loads[o], loads[under], chosen, work, held)
        costs.append(cost)
        subsets.append(subset)
        movable.append(chosen)
    partner = bottleneck_matching(np.array(costs))
    order, deferred = [], []
    for i, o in enumerate(over):
        order += [o, under[partner[i]]]
        bits = int(subsets[i][partner[i]])
        deferred += [sample for place, sample in enumerate(movable[i]) if bits >> place & 1]
    return Pairing((*order, *alone), tuple(deferred))


def _movable(members: Sequence[int], work: np.ndarray) -> list[int]:
    heavy = sorted((i for i in members if work[i]), key=lambda i: (-int(work[i]), i))
    half = MOVABLE // 2
    return heavy if len(heavy) <= MOVABLE else heavy[:half] + heavy[-half:]


def _handovers(
    load: np.int64,
    takers: np.ndarray,
    movable: Sequence[int],
    work: np.ndarray,
    held: tuple[np.ndarray, list[int], int] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """For each taker the larger load of the two after the best handover, and which of `movable` that is, as bits. Of
    equally good ones the one that moves fewest samples."""
    sums = _subset_sums([int(work[i]) for i in movable])
    moved = _subset_sums([1] * len(movable))
    after = np.maximum(load - sums[None, :], takers[:, None] + sums[None, :])
    if held is not None:
        tokens, inside, cap = held
        total = np.array(inside)[:, None] + _subset_sums([int(tokens[i]) for i in movable])[None, :]
        after = np.where((total <= cap) | (sums == 0)[None, :], after, FORBIDDEN)
    best = (after * (MOVABLE + 1) + moved[None, :]).argmin(1)
    return after[np.arange(len(takers)), best], best


def _subset_sums(values: Sequence[int]) -> np.ndarray:
    """The sum of each subset; bit i of its index says whether value i is in it."""
    sums = np.zeros(1, np.int64)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums
