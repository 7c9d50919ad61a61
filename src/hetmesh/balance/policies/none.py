"""No balancing: samples in the order of their keys, cut into runs of nearly equal length."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.from_blocks import from_blocks
from hetmesh.balance.loads import BatchLoads, Slots


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
