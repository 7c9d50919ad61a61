"""Numbers of windows worth trying: fewer where a sample outweighs the mean microbatch; others where the number is free.

A window is a microbatch of the module that has fewest (`batch_blocks.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from hetmesh.balance.assignment import Assignment, BatchLoads, Slots
from hetmesh.balance.batch_blocks import BatchBlocks, from_blocks
from hetmesh.balance.lpt import from_table, longest_first
from hetmesh.balance.step_lengths import Score
from hetmesh.errors import GraphError

SLACK_RATIO = 1.1  # windows beside the least number: what is not divisible never fills bins evenly
MAX_WINDOW_SHARE = 0.9  # a share of the windows above which leaving some empty is not tried


def fewer_windows(loads: BatchLoads, slots: Slots) -> list[int]:
    """Numbers of windows worth trying beside all of them; none where no sample is large.

    A 1F1B pipeline holds a few microbatches at a time, and while a very large one passes, they are all the work that
    other stages have. Larger neighbours keep them busy for longer. The least number is where an even microbatch weighs
    as much as the largest sample, in some module (Entrain's K_eff is about this), so the peak does not grow.
    """
    blocks = BatchBlocks(slots)
    largest = loads.work.max(0, initial=0)
    if not blocks.uniform or not largest.any():
        return []
    even = [
        -(-int(total) // (int(most) * blocks.groups * int(parts)))
        for total, most, parts in zip(loads.work.sum(0), largest, blocks.parts[:, 0], strict=True)
        if most
    ]
    least = math.ceil(SLACK_RATIO * max(even))
    if least > MAX_WINDOW_SHARE * blocks.windows:
        return []
    return sorted({least, (least + blocks.windows) // 2})


def with_windows(slots: Slots, windows: int) -> Slots:
    """`slots` with that many windows."""
    whole = min(slots.microbatches)
    return replace(slots, microbatches=tuple(max(1, count * windows // whole) for count in slots.microbatches))


def no_larger(found: Assignment, plain: Assignment, loads: BatchLoads) -> bool:
    """Whether the largest microbatch of `found` needs hardly more memory than that of `plain`, in every module: it is
    within `SLACK_RATIO` of it or of the largest sample."""
    each = zip(found.sums(loads.work), plain.sums(loads.work), loads.work.max(0, initial=0), strict=True)
    return all(int(own.max()) <= SLACK_RATIO * max(int(other.max()), int(sample)) for own, other, sample in each)


WINDOW_FACTORS = (0.5, 0.625, 0.75, 0.875, 1.25, 1.5, 2.0)
"""Of the number asked for."""
SPARE_PLACES = 2  # empty places per bin beside the mean count
MIN_GAIN = 0.01  # by how much shorter a step must be with other windows, samples placed roughly, to try it thoroughly
CROWDED_RATIO = 1.1  # fullest bin over max(mean, largest sample) from which on a number with more room is looked for
MAX_EXTRA_SHARE = 0.25  # how far that number may be from the one asked for


def free_windows(loads: BatchLoads, slots: Slots, score: Score) -> list[int]:
    """Numbers of windows worth trying beside the one asked for, at most four.

    Where large samples must share bins that they overfill, the nearest larger one in which they need not: of 143
    samples of five tiles and 113 smaller ones two must meet in 128 bins, and need not in 144. Where one sample is much
    larger than the mean bin, fewer (`fewer_windows`). And the one whose step is shortest when samples are placed
    roughly (`longest_first`, a tenth of the time of `two_dim`).
    """
    windows = BatchBlocks(slots).windows
    most = max(-(-len(loads) // BatchBlocks(slots).groups), windows)
    counts = {min(max(round(windows * factor), 1), most) for factor in WINDOW_FACTORS} | {windows}
    lengths = {n: _rough_length(loads, with_windows(slots, n), score) for n in sorted(counts)}
    best = min(lengths, key=lambda n: (lengths[n], abs(n - windows), n))
    shorter = [best] if lengths[best] < lengths[windows] * (1 - MIN_GAIN) else []
    return list(dict.fromkeys(roomier_windows(loads, slots) + fewer_windows(loads, slots) + shorter))


def _rough_length(loads: BatchLoads, slots: Slots, score: Score) -> float:
    """Of a step whose samples are placed the longest first, without exchanges."""
    blocks = BatchBlocks(slots)
    table = longest_first(blocks.normalised(loads), blocks.count, -(-len(loads) // blocks.count) + SPARE_PLACES)
    try:
        return score(from_blocks(loads, slots, from_table(table, len(loads)), policy="longest first"))
    except GraphError:  # too few for a cap
        return float("inf")


def roomier_windows(loads: BatchLoads, slots: Slots) -> list[int]:
    """The smallest number of more windows in which no bin need be crowded, if some bin now must be; at most one."""
    blocks = BatchBlocks(slots)
    if not blocks.uniform or not len(loads) or least_crowding(loads, slots) <= CROWDED_RATIO:
        return []
    last = int(blocks.windows * (1 + MAX_EXTRA_SHARE))
    more = range(blocks.windows + 1, last + 1)
    return next(([n] for n in more if least_crowding(loads, with_windows(slots, n)) <= CROWDED_RATIO), [])


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
