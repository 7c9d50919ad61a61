"""From balanced bins to the windows of lanes: which lane takes which bin, what it defers, and in which order."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.deferral import defer
from hetmesh.balance.fill import longest_first, normalised
from hetmesh.balance.loads import BatchLoads
from hetmesh.balance.orders import best_orders
from hetmesh.balance.resplit import resplit
from hetmesh.balance.tables import as_table


def arrange(loads: BatchLoads, blocks: BatchBlocks, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The block of each sample, and who is deferred (None: nobody), from bins that are as good as each other.

    Bins are dealt to groups of lanes such that each has as much to do in the whole step; if `Slots.deferral` allows,
    the last module's share is evened by deferral; the order of each lane is the best of those tried.
    """
    if not blocks.uniform:  # a bin is made for its window and group
        return bins, None
    slots, windows, groups = blocks.slots, blocks.windows, blocks.groups
    work = np.zeros((blocks.count, len(slots.lanes)), np.int64)
    np.add.at(work, bins, loads.work)
    table = deal(work, groups, windows)
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


def deal(work: np.ndarray, groups: int, windows: int) -> np.ndarray:
    """Bins to groups of lanes, `[groups, windows]`: totals of groups are near each other, and so are the bins of one
    window, heavy ones first.

    Args:
        work: int64 `[groups * windows, modules]`.
    """
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
