"""DistTrain's reordering (Zhang et al., SIGCOMM 2025, arXiv 2408.04275): lanes are balanced, microbatches ordered.

What a microbatch of a lane holds stays as the data order has it, which is why its work varies as that of random ones.
"""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks, from_blocks
from hetmesh.balance.lpt import least_loaded


def disttrain(loads: BatchLoads, slots: Slots) -> Assignment:
    """Lanes by longest processing time first with equal counts; each lane's samples, in the order of their keys, cut
    into microbatches; of these the smallest first, the next smallest last, in between whichever keeps the running sum
    of encoder work nearest to the mean."""
    blocks = BatchBlocks(slots)
    key = loads.work.sum(1)
    order = np.lexsort((-loads.work[:, -1], -key))
    limit = -(-len(loads) // blocks.groups)
    group = least_loaded(order, key, [list(range(blocks.groups))], limit=limit)
    window = np.zeros(len(loads), np.int64)
    for g in range(blocks.groups):
        mine = np.flatnonzero(group == g)
        cut = np.arange(len(mine)) * blocks.windows // max(len(mine), 1)
        work = np.zeros((blocks.windows, loads.work.shape[1]), np.int64)
        np.add.at(work, cut, loads.work[mine])
        place = np.empty(blocks.windows, np.int64)
        place[_reordered(work, sum(slots.stages))] = np.arange(blocks.windows)
        window[mine] = place[cut]
    return from_blocks(loads, slots, window * blocks.groups + group, policy="disttrain")


def _reordered(work: np.ndarray, stages: int) -> np.ndarray:
    """The order of one lane's microbatches (section 5.3): the smallest first, so that all stages start soon; the
    `stages - 1` next ones last, where nothing hides their drain; each gap between is given to the microbatch that fits
    it best, the gap being what was left open so far of the mean encoder work per microbatch."""
    encoder, total = work[:, :-1].sum(1), work.sum(1)
    rising = np.argsort(total, kind="stable").tolist()
    kept = max(min(stages - 1, len(rising) - 1), 0)
    order, tail = rising[:1], rising[1 : 1 + kept][::-1]
    left = rising[1 + kept :]
    mean, count = int(encoder.sum()) // max(len(rising), 1), 1
    done = int(encoder[order].sum())
    while left:
        count += 1
        gap = mean * count - done
        best = min(left, key=lambda m: (abs(int(encoder[m]) - gap), m))
        left.remove(best)
        order.append(best)
        done += int(encoder[best])
    return np.array(order + tail, np.int64)
