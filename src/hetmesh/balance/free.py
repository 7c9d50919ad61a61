"""Other numbers of windows than asked for, where their number is free: which are worth a balancer's time."""

from __future__ import annotations

import numpy as np

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.fewer import fewer_windows, with_windows
from hetmesh.balance.fill import longest_first
from hetmesh.balance.from_blocks import from_blocks
from hetmesh.balance.loads import BatchLoads, Slots
from hetmesh.balance.pipeline import Score
from hetmesh.balance.tables import from_table
from hetmesh.errors import GraphError

FACTORS = (0.5, 0.625, 0.75, 0.875, 1.25, 1.5, 2.0)
"""Of the number asked for."""
SPARE = 2  # empty places per bin beside the mean count
BETTER = 0.01  # by how much shorter a step must be with other windows, samples placed roughly, to try it thoroughly
CROWDED = 1.1  # the fullest bin over max(mean, largest sample) from which on a number with more room is looked for
NEAR = 0.25  # how far that number may be from the one asked for


def free_windows(loads: BatchLoads, slots: Slots, score: Score) -> list[int]:
    """Numbers of windows worth trying beside the one asked for, at most four.

    Where large samples must share bins that they overfill, the nearest larger one in which they need not: of 143
    samples of five tiles and 113 smaller ones two must meet in 128 bins, and need not in 144. Where one sample is much
    larger than the mean bin, fewer (`fewer_windows`). And the one whose step is shortest when samples are placed
    roughly (`longest_first`, a tenth of the time of `two_dim`).
    """
    windows = BatchBlocks(slots).windows
    most = max(-(-len(loads) // BatchBlocks(slots).groups), windows)
    counts = {min(max(round(windows * factor), 1), most) for factor in FACTORS} | {windows}
    lengths = {n: _rough_length(loads, with_windows(slots, n), score) for n in sorted(counts)}
    best = min(lengths, key=lambda n: (lengths[n], abs(n - windows), n))
    shorter = [best] if lengths[best] < lengths[windows] * (1 - BETTER) else []
    return list(dict.fromkeys(roomier_windows(loads, slots) + fewer_windows(loads, slots) + shorter))


def _rough_length(loads: BatchLoads, slots: Slots, score: Score) -> float:
    try:
        return score(rough(loads, slots))
    except GraphError:  # too few for a cap
        return float("inf")


def rough(loads: BatchLoads, slots: Slots) -> Assignment:
    """The longest first, and no exchanges.

    Raises:
        GraphError: no way was found to keep a cap.
    """
    blocks = BatchBlocks(slots)
    table = longest_first(blocks.normalised(loads), blocks.count, -(-len(loads) // blocks.count) + SPARE)
    return from_blocks(loads, slots, from_table(table, len(loads)), policy="longest first")


def roomier_windows(loads: BatchLoads, slots: Slots) -> list[int]:
    """The smallest number of more windows in which no bin need be crowded, if some bin now must be; at most one."""
    blocks = BatchBlocks(slots)
    if not blocks.uniform or not len(loads) or least_crowding(loads, slots) <= CROWDED:
        return []
    last = int(blocks.windows * (1 + NEAR))
    more = range(blocks.windows + 1, last + 1)
    return next(([n] for n in more if least_crowding(loads, with_windows(slots, n)) <= CROWDED), [])


def least_crowding(loads: BatchLoads, slots: Slots) -> float:
    """What the fullest bin of any module holds at least, over max(mean, largest sample): of the bins + 1 largest
    samples two must share a bin, of the 2 bins + 1 largest three, and so on."""
    blocks, out = BatchBlocks(slots), 1.0
    for column, parts in zip(loads.work.T, blocks.parts[:, 0], strict=True):
        bins = blocks.count * int(parts)
        falling = np.sort(column)[::-1]
        simple = max(float(falling.sum()) / bins, float(falling[0]), 1.0)
        ways = range(2, (len(falling) - 1) // bins + 2)
        least = [float(falling[(k - 1) * bins + 1 - k : (k - 1) * bins + 1].sum()) for k in ways]
        out = max([out, *(value / simple for value in least)])
    return out
