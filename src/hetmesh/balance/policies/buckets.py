"""Buckets of like length: for a last module that pads its samples to the longest of their microbatch and lane."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.from_blocks import from_blocks
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.policies.sorted import by_length


def buckets(loads: BatchLoads, slots: Slots) -> Assignment:
    """Runs of falling length that take equally long padded: few long samples here, many short ones there.

    The longest that a run may take is as small as lets all samples go into the blocks. Inside a window lanes take runs
    of like length in turns. Where nothing is padded, or counts must be equal, it is `by_length`.
    """
    blocks = BatchBlocks(slots)
    if not loads.pads or slots.equal_counts or not len(loads):
        return by_length(loads, slots)
    order = np.lexsort((loads.work[:, 0], -loads.tokens[:, -1]))
    each = loads.padded_work(np.ones(len(loads), np.int64), loads.tokens[order, -1])
    each = np.maximum(each, 1)
    low, high = int(each[0]), int(each[0]) * len(each)
    while low < high:
        middle = (low + high) // 2
        if _runs(each, middle, blocks.count) is None:
            low = middle + 1
        else:
            high = middle
    starts = _runs(each, low, blocks.count)
    assert starts is not None
    run = np.searchsorted(starts, np.arange(len(loads)), side="right") - 1
    window, turn = np.divmod(run, blocks.groups)
    group = np.where(window % 2 == 1, blocks.groups - 1 - turn, turn)
    block = np.empty(len(loads), np.int64)
    block[order] = window * blocks.groups + group
    return from_blocks(loads, slots, block, policy="buckets")


def _runs(each: np.ndarray, most: int, blocks: int) -> list[int] | None:
    """Where runs start of which none takes longer than `most`, its samples as long as its first; None where there are
    more of them than blocks."""
    starts: list[int] = []
    at = 0
    while at < len(each):
        if len(starts) == blocks:
            return None
        starts.append(at)
        at += max(most // int(each[at]), 1)
    return starts
