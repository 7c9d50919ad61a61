"""The order of a lane's microbatches: a few dozen are tried, the one with the shortest step is kept."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.fill import scrambled
from hetmesh.balance.loads import Slots
from hetmesh.balance.pipeline import step_lengths

RANDOM = 12  # random orders among the first candidates
CHANGED = 20  # orders derived from the best one in each later round
MANY = 64  # groups of lanes above which only the first candidates are tried, without random ones


def best_orders(
    work: np.ndarray, slots: Slots, *, unit: int = 1, late: np.ndarray | None = None, rounds: int = 2
) -> np.ndarray:
    """The order of the windows of each group, int64 `[groups, windows]`.

    Small microbatches at both ends shorten the filling and draining of a pipeline, neighbours of like size keep its
    stages from waiting for each other (the idea of DistTrain's inter-microbatch reordering, arXiv 2408.04275). Which
    matters more depends on the batch, so orders of several kinds are scored, and changes of the best of them.

    Args:
        work: int64 `[groups, windows, modules]`, as `pipeline.step_lengths` takes it.
        unit: windows that stay together (deferral pairs two); what does not fill a unit stays last.
        late: see `step_lengths`, by group.
        rounds: of changes.
    """
    groups, windows, _ = work.shape
    seen = work.max(0, keepdims=True) if slots.lockstep else work
    if late is not None and slots.lockstep:
        late = np.asarray(late.any(0, keepdims=True))
    units = windows // unit
    if units > 1:
        pooled = seen[:, : units * unit].reshape(len(seen), units, unit, -1).sum(2)
        best = _searched(seen, pooled, slots, unit, late, rounds)
    else:
        best = np.tile(np.arange(windows), (len(seen), 1))
    return np.broadcast_to(best, (groups, windows)).copy() if slots.lockstep else best


def _searched(
    work: np.ndarray, pooled: np.ndarray, slots: Slots, unit: int, late: np.ndarray | None, rounds: int
) -> np.ndarray:
    few = len(pooled) <= MANY
    candidates = _first(pooled, RANDOM if few else 0)
    best, length = _score(work, candidates, slots, unit, late)
    for i in range(rounds if few else 0):
        changed = np.stack([_changed(best, 97 * i + j) for j in range(CHANGED)])
        found, shorter = _score(work, changed, slots, unit, late)
        better = shorter < length
        best = np.where(better[:, None], found, best)
        length = np.minimum(length, shorter)
    return _windows(best, unit, work.shape[1])


def _first(pooled: np.ndarray, randoms: int) -> np.ndarray:
    """Candidates `[orders, groups, units]`: as given, by each module's work and by their sum, also as pyramids and
    valleys, by how much the encoders have more (Johnson's rule for two machines), and random ones."""
    groups, units, modules = pooled.shape
    encoders, last, total = pooled[:, :, :-1].sum(2), pooled[:, :, -1], pooled.sum(2)
    keys = [total, last, encoders, encoders - last] if modules > 1 else [total]
    out = [np.tile(np.arange(units), (groups, 1))]
    for key in keys:
        rising = np.argsort(key, axis=1, kind="stable")
        pyramid = np.concatenate([rising[:, ::2], rising[:, 1::2][:, ::-1]], 1)
        out += [rising, rising[:, ::-1], pyramid, np.roll(pyramid, units // 2, 1)]
    out += [np.tile(scrambled(units, seed), (groups, 1)) for seed in range(randoms)]
    return np.stack(out)


def _changed(orders: np.ndarray, seed: int) -> np.ndarray:
    """Each order with two places exchanged."""
    units = orders.shape[1]
    first, second = scrambled(units, 5000 + seed)[:2]
    out = orders.copy()
    out[:, [first, second]] = orders[:, [second, first]]
    return out


def _score(
    work: np.ndarray, candidates: np.ndarray, slots: Slots, unit: int, late: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The best of `candidates` `[orders, groups, units]` for each group, and its length."""
    count, groups, _ = candidates.shape
    windows = np.stack([_windows(order, unit, work.shape[1]) for order in candidates])
    ordered = np.take_along_axis(work[None], windows[..., None], 2).reshape(count * groups, *work.shape[1:])
    if late is not None:
        late = np.take_along_axis(late[None], windows, 2).reshape(count * groups, -1)
    lengths = step_lengths(ordered, slots.stages, slots.backward, late=late).reshape(count, groups)
    best = lengths.argmin(0)
    each = np.arange(groups)
    return candidates[best, each], lengths[best, each]


def _windows(order: np.ndarray, unit: int, windows: int) -> np.ndarray:
    """From an order of units `[groups, units]` to one of windows."""
    inside = (order[:, :, None] * unit + np.arange(unit)).reshape(len(order), -1)
    rest = np.tile(np.arange(inside.shape[1], windows), (len(order), 1))
    return np.concatenate([inside, rest], 1)
