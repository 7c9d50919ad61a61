"""The simple balancers: the order of the data, sorting and buckets by length, and longest processing time first."""

from __future__ import annotations

import bisect

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks, from_blocks
from hetmesh.balance.lpt import least_loaded


def none(loads: BatchLoads, slots: Slots) -> Assignment:
    """Every microbatch of every module is the next run of samples, cut into one run per lane, equally many for each
    lane of the last module. The last microbatch may be smaller. Only where a cap would be broken do samples move."""
    places = np.arange(len(loads))
    microbatch, lane = np.empty_like(loads.work), np.empty_like(loads.work)
    for i, (lanes, count) in enumerate(zip(slots.lanes, slots.microbatches, strict=True)):
        size = max(-(-len(loads) // (count * slots.lanes[-1])), 1) * slots.lanes[-1]
        microbatch[:, i] = places // size
        held = np.minimum(size, len(loads) - microbatch[:, i] * size)
        base, extra = np.divmod(held, lanes)
        place = places % size
        early = extra * (base + 1)
        lane[:, i] = np.where(place < early, place // (base + 1), extra + (place - early) // np.maximum(base, 1))
    deferred = np.zeros(len(loads), bool)
    found = Assignment(slots.lanes, slots.microbatches, microbatch, lane, deferred, "none")
    over = any(
        cap is not None and bins.max(initial=0) > cap
        for cap, bins in zip(slots.max_tokens, found.sums(loads.tokens), strict=True)
    )
    if not over:
        return found
    blocks = BatchBlocks(slots)
    window, group = blocks.window_of[-1][microbatch[:, -1]], blocks.group_of[-1][lane[:, -1]]
    return from_blocks(loads, slots, window * blocks.groups + group, policy="none")


def by_length(loads: BatchLoads, slots: Slots) -> Assignment:
    """Runs of equal counts by rising work of all modules together; inside a window, to the groups of lanes and back.

    Lanes are even in every window, windows are as uneven as samples are.
    """
    blocks = BatchBlocks(slots)
    order = np.lexsort((loads.work[:, -1], blocks.normalised(loads).sum(1)))
    rank = np.empty(len(loads), np.int64)
    rank[order] = np.arange(len(loads))
    window = rank * blocks.windows // max(len(loads), 1)
    first = -(-window * len(loads) // blocks.windows)
    turn, place = np.divmod(rank - first, blocks.groups)
    group = np.where(turn % 2 == 1, blocks.groups - 1 - place, place)
    return from_blocks(loads, slots, window * blocks.groups + group, policy="sorted")


def buckets(loads: BatchLoads, slots: Slots) -> Assignment:
    """Runs of falling length that take equally long padded: few long samples here, many short ones there.

    The longest that a run may take is as small as lets all samples go into the blocks. Inside a window lanes take runs
    of like length in turns. Where nothing is padded it is `by_length`.
    """
    blocks = BatchBlocks(slots)
    if not loads.pads or not len(loads):
        return by_length(loads, slots)
    order = np.lexsort((loads.work[:, 0], -loads.tokens[:, -1]))
    each = loads.padded_work(np.ones(len(loads), np.int64), loads.tokens[order, -1])
    each = np.maximum(each, 1)
    longest = int(each[0])
    most = range(longest, longest * len(each) + 1)
    at = bisect.bisect_left(most, True, hi=len(most) - 1, key=lambda m: _runs(each, m, blocks.count) is not None)
    starts = _runs(each, most[at], blocks.count)
    assert starts is not None
    run = np.searchsorted(starts, np.arange(len(loads)), side="right") - 1
    window, turn = np.divmod(run, blocks.groups)
    group = np.where(window % 2 == 1, blocks.groups - 1 - turn, turn)
    block = np.empty(len(loads), np.int64)
    block[order] = window * blocks.groups + group
    return from_blocks(loads, slots, block, policy="buckets")


def _runs(each: np.ndarray, most: int, blocks: int) -> list[int] | None:
    """Where runs start of which none takes longer than `most`, samples as long as the first; None: too many."""
    starts: list[int] = []
    at = 0
    while at < len(each):
        if len(starts) == blocks:
            return None
        starts.append(at)
        at += max(most // int(each[at]), 1)
    return starts


def lpt(loads: BatchLoads, slots: Slots) -> Assignment:
    """Samples by falling work, each to the block with least so far. Counts vary; the order of blocks is as it comes."""
    blocks = BatchBlocks(slots)
    key = loads.work.sum(1)
    order = np.lexsort((-loads.work[:, -1], -key))
    block = least_loaded(order, key, [list(range(blocks.count))])
    return from_blocks(loads, slots, block, policy="lpt")
