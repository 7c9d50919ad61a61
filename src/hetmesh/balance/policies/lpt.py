"""Longest processing time first on one key: the work of all modules together (Graham, 1969)."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.fill import least_loaded
from hetmesh.balance.from_blocks import from_blocks
from hetmesh.balance.loads import BatchLoads, Slots


def lpt(loads: BatchLoads, slots: Slots) -> Assignment:
    """Samples by falling work, each to the block with least so far. Counts vary; the order of blocks is as it comes."""
    blocks = BatchBlocks(slots)
    key = loads.work.sum(1)
    order = np.lexsort((-loads.work[:, -1], -key))
    limit = -(-len(loads) // blocks.count) if slots.equal_counts else 0
    block = least_loaded(order, key, [list(range(blocks.count))], limit=limit)
    return from_blocks(loads, slots, block, policy="lpt")
