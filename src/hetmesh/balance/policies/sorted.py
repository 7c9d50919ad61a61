"""Sorting by length: samples of like size share a microbatch, as bucketing samplers do."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.from_blocks import from_blocks
from hetmesh.balance.loads import BatchLoads, Slots


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
