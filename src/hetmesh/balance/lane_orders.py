"""From balanced bins to lanes: which lane takes which bin, what it defers, and the best order among those tried."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks
from hetmesh.balance.deferral import defer
from hetmesh.balance.local_search import resplit
from hetmesh.balance.lpt import as_table, longest_first, normalised, scrambled
from hetmesh.balance.step_lengths import step_lengths


def arrange_lanes(loads: BatchLoads, blocks: BatchBlocks, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The block of each sample, and who is deferred (None: nobody), from bins that are as good as each other.

    Bins are dealt to groups of lanes such that each has as much to do in the whole step; if `Slots.deferral` allows,
    the last module's share is evened by deferral; the order of each lane is the best of those tried.
    """
    if not blocks.uniform:  # a bin is made for its window and group
        return bins, None
    slots, windows, groups = blocks.slots, blocks.windows, blocks.groups
    work = np.zeros((blocks.count, len(slots.lanes)), np.int64)
    np.add.at(work, bins, loads.work)
    table = deal_bins(work, groups, windows)
    deferred = None
    if slots.deferral and windows > 1:
        table, deferred = _deferred(loads, blocks, bins, table)
        late = np.flatnonzero(deferred)
        place = np.empty(blocks.count, np.int64)
        place[table.ravel()] = np.arange(blocks.count)
        after = table.ravel()[place[bins[late]] + 1]
        np.add.at(work[:, -1], after, loads.work[late, -1])
        np.subtract.at(work[:, -1], bins[late], loads.work[late, -1])
    pooled = work[table] // blocks.parts[:, 0] + np.array(slots.overhead)
    if deferred is None:
        order = best_orders(pooled, slots)
    else:
        late = np.zeros(blocks.count, bool)
        late[bins[deferred]] = True
        order = best_orders(pooled, slots, unit=2, late=late[table])
    table = np.take_along_axis(table, order, 1)
    block = np.empty(blocks.count, np.int64)
    block[table] = np.arange(windows) * groups + np.arange(groups)[:, None]
    return block[bins], deferred


def deal_bins(work: np.ndarray, groups: int, windows: int) -> np.ndarray:
    """Bins to groups of lanes, `[groups, windows]`: totals of groups are near each other, and so are the bins of one
    window, heavy ones first. `work`: int64 `[groups * windows, modules]`."""
    if windows == 1:  # each group has one, and all are alike
        return np.arange(groups)[:, None]
    load = normalised(work, groups)
    table = longest_first(load, groups, windows)
    if groups > 1:
        table = resplit(load, table, 8)
    heavy = np.argsort(-load.max(1)[table], axis=1, kind="stable")
    return np.take_along_axis(table, heavy, 1)


def _deferred(
    loads: BatchLoads, blocks: BatchBlocks, bins: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The order of bins by pairs, and who is deferred, lane by lane."""
    members = as_table(bins, blocks.count)
    sizes = np.bincount(bins, minlength=blocks.count)
    cap = blocks.slots.max_tokens[-1]
    cap = None if cap is None else cap * int(blocks.parts[-1, 0])
    out, deferred = np.empty_like(table), np.zeros(len(loads), bool)
    for group, row in enumerate(table):
        inside = [members[b, : sizes[b]].tolist() for b in row.tolist()]
        pairing = defer(inside, loads.work[:, -1], loads.tokens[:, -1], cap)
        out[group] = row[list(pairing.order)]
        deferred[list(pairing.deferred)] = True
    return out, deferred


RANDOM_ORDERS = 12  # random orders among the first candidates
CHANGED_ORDERS = 20  # orders derived from the best one in each later round
MAX_SEARCHED_GROUPS = 64  # groups of lanes above which only the first candidates are tried, without random ones


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
    few = len(pooled) <= MAX_SEARCHED_GROUPS
    candidates = _first(pooled, RANDOM_ORDERS if few else 0)
    best, length = _score(work, candidates, slots, unit, late)
    for i in range(rounds if few else 0):
        changed = np.stack([_changed(best, 97 * i + j) for j in range(CHANGED_ORDERS)])
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
    if slots.lengths is None or late is not None:  # another order of what is late would be another schedule
        lengths = step_lengths(ordered, slots.stages, slots.backward, late=late)
    else:
        lengths = slots.lengths(ordered, slots.backward)
    lengths = lengths.reshape(count, groups)
    best = lengths.argmin(0)
    each = np.arange(groups)
    return candidates[best, each], lengths[best, each]


def _windows(order: np.ndarray, unit: int, windows: int) -> np.ndarray:
    """From an order of units `[groups, units]` to one of windows."""
    inside = (order[:, :, None] * unit + np.arange(unit)).reshape(len(order), -1)
    rest = np.tile(np.arange(inside.shape[1], windows), (len(order), 1))
    return np.concatenate([inside, rest], 1)
