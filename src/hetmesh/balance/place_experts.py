"""Which rank of an expert-parallel axis holds which expert: integers in, a map out. Moving experts changes where a
token is computed, never what comes out.

Ranks hold equally many experts, since their weights are equal shards of one tensor, so experts are exchanged. Exchanges
from where experts lie end as even as those from the balanced packing of DeepSeek's EPLB (github.com/deepseek-ai/EPLB;
within 0.2% in the mean of random loads), and move fewer. EPLB copies hot experts too: not here, copies would have to
sum their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetmesh.errors import GraphError

Placement = tuple[int, ...]
"""The expert at each place. Rank r of n holds places r * E/n to (r + 1) * E/n - 1."""


def place_experts(
    loads: Sequence[int], ranks: int, current: Sequence[int] | None = None, *, worth: float = 0.05
) -> Placement:
    """Where the experts of one layer shall lie, by their measured loads.

    A pure function of integers: equal on all ranks.

    Args:
        loads: tokens per expert, of some steps.
        ranks: of the axis; it divides the number of experts.
        current: the present placement; None: expert e at place e.
        worth: by which share the load of the fullest rank must fall for anything to be moved at all.

    Raises:
        GraphError: a load is negative or no integer, ranks do not divide experts, or `current` is no permutation.
    """
    weights, here = _checked(loads, ranks, current)
    held = here.reshape(ranks, -1)
    best = _exchanged(weights, held)
    if _fullest(weights, best) > (1 - worth) * _fullest(weights, held):
        return tuple(here.tolist())
    return tuple(_settled(best, held).ravel().tolist())


def rank_loads(loads: Sequence[int], placement: Sequence[int], ranks: int) -> np.ndarray:
    """Tokens per rank, `[ranks]`."""
    return np.asarray(loads, np.int64)[np.asarray(placement)].reshape(ranks, -1).sum(1)


def skew(loads: Sequence[int], placement: Sequence[int], ranks: int) -> float:
    """The load of the fullest rank over the mean of all; 1 without any load."""
    held = rank_loads(loads, placement, ranks)
    return float(held.max() / held.mean()) if held.any() else 1.0


def _checked(loads: Sequence[int], ranks: int, current: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    weights = np.asarray(loads)
    if weights.ndim != 1 or not np.issubdtype(weights.dtype, np.integer) or (weights < 0).any():
        raise GraphError(f"loads of experts must be integers of at least 0, one per expert, got {loads!r}")
    if ranks < 1 or not len(weights) or len(weights) % ranks:
        raise GraphError(f"{len(weights)} experts cannot be dealt evenly to {ranks} ranks")
    here = np.arange(len(weights)) if current is None else np.asarray(current)
    if here.shape != weights.shape or not np.array_equal(np.sort(here), np.arange(len(weights))):
        raise GraphError(f"a placement of {len(weights)} experts must name each of them once, got {current!r}")
    return weights.astype(np.int64), here


def _exchanged(weights: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Exchange an expert of the fullest rank for one of another, whichever leaves the fuller of the two emptiest, for
    as long as that is emptier than the fullest was. Ends, since the sum of squared loads falls."""
    held = held.copy()
    while True:
        own = weights[held]
        load = own.sum(1)
        full = int(load.argmax())
        given = own[full][:, None, None] - own[None]  # what the fullest would be rid of: [its experts, ranks, theirs]
        worst = np.maximum(load[full] - given, load[None, :, None] + given)
        worst[:, full] = load[full]
        mine, rank, theirs = np.unravel_index(int(worst.argmin()), worst.shape)
        if worst[mine, rank, theirs] >= load[full]:
            return held
        held[full, mine], held[rank, theirs] = held[rank, theirs], held[full, mine]


def _fullest(weights: np.ndarray, held: np.ndarray) -> int:
    return int(weights[held].sum(1).max())


def _settled(held: np.ndarray, here: np.ndarray) -> np.ndarray:
    """The same experts per rank; those that stay on a rank stay at their place."""
    out = here.copy()
    for mine, before in zip(held, out, strict=True):
        new = iter(sorted(set(mine.tolist()) - set(before.tolist())))
        stays = set(mine.tolist())
        for place, expert in enumerate(before.tolist()):
            if expert not in stays:
                before[place] = next(new)
    return out
