"""hetmesh's own balancer: the work of all modules at once, with counts of samples that vary."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.arrange import arrange
from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import Blocks
from hetmesh.balance.fill import longest_first
from hetmesh.balance.from_blocks import fitted, from_blocks
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.resplit import resplit
from hetmesh.balance.tables import from_table

ROUNDS = 48  # of exchanges; after 40 the standard deviation falls by less than 2% per round, whatever the batch
MANY = 2048  # bins from which on fewer rounds are made: with so many samples there is nearly always a good partner
ROUNDS_OF_MANY = 24
SPARE = 4  # empty places per bin beside the mean count: with 2 to 8 the results are alike, with 0 far worse
TOLERANCE = 0.002


def two_dim(loads: BatchLoads, slots: Slots) -> Assignment:
    """Longest first over all blocks, by the module that dominates; then exchanges between pairs of blocks that see all
    modules; then lanes, deferral where `slots` allows it, and the order of each lane (`arrange`)."""
    return arranged(loads, slots, balanced(loads, slots))


def balanced(loads: BatchLoads, slots: Slots) -> np.ndarray:
    """The first part: the bin of each sample, int64 `[samples]`; `slots.deferral` makes no difference to it."""
    blocks = Blocks(slots)
    load = blocks.normalised(loads)
    spare = 0 if slots.equal_counts else SPARE
    bins = longest_first(load, blocks.count, -(-len(loads) // blocks.count) + spare)
    bins = resplit(
        load,
        bins,
        ROUNDS if blocks.count < MANY else ROUNDS_OF_MANY,
        target=None if blocks.uniform else blocks.target,
        tolerance=TOLERANCE,
        equal_counts=slots.equal_counts,
    )
    return fitted(loads, blocks, from_table(bins, len(loads)))


def arranged(loads: BatchLoads, slots: Slots, bins: np.ndarray) -> Assignment:
    """The second part: the assignment of samples whose bins are known."""
    block, deferred = arrange(loads, Blocks(slots), bins)
    return from_blocks(loads, slots, block, deferred, policy="two_dim")
