"""hetmesh's own balancer: the work of all modules at once, with counts of samples that vary."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks, fitted, from_blocks
from hetmesh.balance.lane_orders import arrange_lanes
from hetmesh.balance.local_search import lower_peaks, resplit
from hetmesh.balance.lpt import SCALE, from_table, longest_first

SPARE_PLACES = 2  # empty places per bin beside the mean count: 1 to 6 give like results, 0 far worse ones
TOLERANCE = 0.002  # of the mean load; nobody sees a difference below
GUARD_RATIO = 1.05  # the last exchanges let no bin beyond this much of what the fullest has to hold


def two_dim(loads: BatchLoads, slots: Slots) -> Assignment:
    """Longest first over all blocks, by the module that dominates; then exchanges between pairs of blocks that see all
    modules; then lanes, deferral where `slots` allows it, and the order of each lane (`arrange_lanes`)."""
    return arranged(loads, slots, balanced(loads, slots))


def balanced(loads: BatchLoads, slots: Slots) -> np.ndarray:
    """The first part: the bin of each sample, int64 `[samples]`; `slots.deferral` makes no difference to it."""
    blocks = BatchBlocks(slots)
    load = blocks.normalised(loads)
    bins = longest_first(load, blocks.count, -(-len(loads) // blocks.count) + SPARE_PLACES)
    rounds = exchanges(blocks.count)
    target = None if blocks.uniform else blocks.target
    bins = resplit(load, bins, rounds, target=target, tolerance=TOLERANCE)
    if blocks.uniform and len(loads):
        limit = np.maximum(load.max(0), SCALE)
        bins = lower_peaks(load, bins, limit)
        guard = np.rint(GUARD_RATIO * limit)
        bins = resplit(load, bins, rounds // 3, tolerance=TOLERANCE, limit=guard, seed=rounds)
    return fitted(loads, blocks, from_table(bins, len(loads)))


def exchanges(bins: int) -> int:
    """Rounds of exchanges: few for few bins, which have few partners, and for many, where a good one is soon found."""
    return min(16 + 2 * bins, 64, 16 + 4096 // bins)


def arranged(loads: BatchLoads, slots: Slots, bins: np.ndarray) -> Assignment:
    """The second part: the assignment of samples whose bins are known."""
    block, deferred = arrange_lanes(loads, BatchBlocks(slots), bins)
    return from_blocks(loads, slots, block, deferred, policy="two_dim")
