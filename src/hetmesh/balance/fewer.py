"""Fewer microbatches than there are: where one sample outweighs the mean microbatch, others may be as large as it."""

from __future__ import annotations

import math
from dataclasses import replace

from hetmesh.balance.assignment import Assignment
from hetmesh.balance.blocks import BatchBlocks
from hetmesh.balance.loads import BatchLoads, Slots

ROOM = 1.1  # windows beside the least number: what is not divisible never fills bins evenly
WORTH = 0.9  # a share of the windows above which leaving some empty is not tried


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
    least = math.ceil(ROOM * max(even))
    if least > WORTH * blocks.windows:
        return []
    return sorted({least, (least + blocks.windows) // 2})


def with_windows(slots: Slots, windows: int) -> Slots:
    """`slots` with that many windows."""
    whole = min(slots.microbatches)
    return replace(slots, microbatches=tuple(max(1, count * windows // whole) for count in slots.microbatches))


def no_larger(found: Assignment, plain: Assignment, loads: BatchLoads) -> bool:
    """Whether the largest microbatch of `found` needs hardly more memory than that of `plain`, in every module: it is
    within `ROOM` of it or of the largest sample."""
    each = zip(found.sums(loads.work), plain.sums(loads.work), loads.work.max(0, initial=0), strict=True)
    return all(int(own.max()) <= ROOM * max(int(other.max()), int(sample)) for own, other, sample in each)


def padded(assignment: Assignment, slots: Slots) -> Assignment:
    """`assignment` with empty microbatches at its end, as many as `slots` has more."""
    return replace(assignment, microbatches=slots.microbatches)
